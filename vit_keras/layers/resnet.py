"""The pieces of the hybrid's ResNet: weight-standardised convolutions and post-activation bottlenecks."""

import keras
from keras import ops

from vit_keras.checks import as_int


@keras.saving.register_keras_serializable("vit_keras")
class StdConv2D(keras.layers.Conv2D):
    """Convolution whose kernel is standardised before use: zero mean, unit deviation per output channel.

    Arguments are those of `keras.layers.Conv2D`; padding `"same"`, no bias and `lecun_normal` are the defaults here.

    Reference: Qiao et al. 2019, "Weight Standardization" (arXiv 1903.10520); vision_transformer `models_resnet.py`,
        `weight_standardize`: (w - mean) / (std + 1e-5), the epsilon added to the deviation.
    """

    def __init__(self, filters, kernel_size, strides=1, **kwargs):
        defaults = {"padding": "same", "use_bias": False, "kernel_initializer": "lecun_normal"}
        kwargs = {**defaults, **kwargs, "data_format": "channels_last"}
        super().__init__(filters, kernel_size, strides=strides, **kwargs)

    def convolution_op(self, inputs, kernel):
        kernel = ops.cast(kernel, keras.backend.result_type(kernel.dtype, "float32"))
        kernel = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        kernel = kernel / (ops.std(kernel, axis=(0, 1, 2), keepdims=True) + 1e-5)
        return super().convolution_op(inputs, ops.cast(kernel, inputs.dtype))


def group_norm(name, dtype, **kwargs):
    """GroupNorm as the original code has it: 32 groups, epsilon 1e-6."""
    return keras.layers.GroupNormalization(32, epsilon=1e-6, axis=-1, dtype=dtype, name=name, **kwargs)


@keras.saving.register_keras_serializable("vit_keras")
class Bottleneck(keras.layers.Layer):
    """Post-activation residual unit of BiT's kind: (B, H, W, C) -> (B, H / strides, W / strides, 4 * filters).

    1x1, 3x3 (strided) and 1x1 standardised convolutions with GroupNorm and ReLU between, and a projection of the
    input where channels or size change.

    Args:
        filters: channels of the two inner convolutions; the output has four times as many, all multiples of 32.
        strides: of the 3x3 convolution and the projection. Default 1.

    Reference: vision_transformer `models_resnet.py`, `ResidualUnit`.
    """

    def __init__(self, filters, strides=1, **kwargs):
        super().__init__(**kwargs)
        self.filters = as_int(filters, "filters")
        self.strides = as_int(strides, "strides")

    def build(self, input_shape):
        policy = self.dtype_policy
        self.conv1 = StdConv2D(self.filters, 1, dtype=policy, name="conv1")
        self.gn1 = group_norm("gn1", policy)
        self.conv2 = StdConv2D(self.filters, 3, self.strides, dtype=policy, name="conv2")
        self.gn2 = group_norm("gn2", policy)
        self.conv3 = StdConv2D(4 * self.filters, 1, dtype=policy, name="conv3")
        # Zero: at the start of training the unit is its shortcut.
        self.gn3 = group_norm("gn3", policy, gamma_initializer="zeros")
        branch = [self.conv1, self.gn1, self.conv2, self.gn2, self.conv3, self.gn3]
        self._build_chain(branch, input_shape)
        self.projects = input_shape[-1] != 4 * self.filters or self.strides != 1
        if self.projects:
            self.conv_proj = StdConv2D(4 * self.filters, 1, self.strides, dtype=policy, name="conv_proj")
            self.gn_proj = group_norm("gn_proj", policy)
            self._build_chain([self.conv_proj, self.gn_proj], input_shape)

    @staticmethod
    def _build_chain(layers, shape):
        for layer in layers:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, inputs):
        x = ops.relu(self.gn1(self.conv1(inputs)))
        x = ops.relu(self.gn2(self.conv2(x)))
        x = self.gn3(self.conv3(x))
        shortcut = self.gn_proj(self.conv_proj(inputs)) if self.projects else inputs
        return ops.relu(ops.add(shortcut, x))

    def compute_output_shape(self, input_shape):
        size = [length and -(-length // self.strides) for length in input_shape[1:3]]
        return (input_shape[0], *size, 4 * self.filters)

    def get_config(self):
        return {**super().get_config(), "filters": self.filters, "strides": self.strides}
