"""The pieces of the hybrid's ResNet: weight-standardised convolutions and post-activation bottlenecks."""

import keras
from keras import ops

from vit_keras.checks import as_int, as_positive


@keras.saving.register_keras_serializable("vit_keras")
class StdConv2D(keras.layers.Conv2D):
    """Convolution whose kernel is standardised before use: zero mean, unit deviation per output channel.

    Arguments are those of `keras.layers.Conv2D`; padding `"same"`, no bias and `lecun_normal` are the defaults here.

    Args:
        epsilon: of the standardisation. Default 1e-5.
        epsilon_in_variance: whether it is added to the variance, (w - mean) / sqrt(var + epsilon), timm's form, or
            to the deviation, (w - mean) / (std + epsilon), the original code's. Default False, the latter.

    Reference: Qiao et al. 2019, "Weight Standardization" (arXiv 1903.10520); vision_transformer `models_resnet.py`,
        `weight_standardize`; timm `layers/std_conv.py`, `StdConv2dSame`.
    """

    def __init__(self, filters, kernel_size, strides=1, epsilon=1e-5, epsilon_in_variance=False, **kwargs):
        defaults = {"padding": "same", "use_bias": False, "kernel_initializer": "lecun_normal"}
        kwargs = {**defaults, **kwargs, "data_format": "channels_last"}
        super().__init__(filters, kernel_size, strides=strides, **kwargs)
        self.epsilon = as_positive(epsilon, "epsilon")
        self.epsilon_in_variance = bool(epsilon_in_variance)

    def convolution_op(self, inputs, kernel):
        kernel = ops.cast(kernel, keras.backend.result_type(kernel.dtype, "float32"))
        kernel = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        if self.epsilon_in_variance:
            kernel = kernel * ops.rsqrt(ops.mean(ops.square(kernel), axis=(0, 1, 2), keepdims=True) + self.epsilon)
        else:
            kernel = kernel / (ops.std(kernel, axis=(0, 1, 2), keepdims=True) + self.epsilon)
        return super().convolution_op(inputs, ops.cast(kernel, inputs.dtype))

    def get_config(self):
        config = {"epsilon": self.epsilon, "epsilon_in_variance": self.epsilon_in_variance}
        return {**super().get_config(), **config}


def group_norm(name, dtype, epsilon=1e-6, **kwargs):
    """GroupNorm of 32 groups, as the original code has it."""
    return keras.layers.GroupNormalization(32, epsilon=epsilon, axis=-1, dtype=dtype, name=name, **kwargs)


@keras.saving.register_keras_serializable("vit_keras")
class Bottleneck(keras.layers.Layer):
    """Post-activation residual unit of BiT's kind: (B, H, W, C) -> (B, H / strides, W / strides, 4 * filters).

    1x1, 3x3 (strided) and 1x1 standardised convolutions with GroupNorm and ReLU between, and a projection of the
    input where channels or size change.

    Args:
        filters: channels of the two inner convolutions; the output has four times as many, all multiples of 32.
        strides: of the 3x3 convolution and the projection. Default 1.
        norm_epsilon: of the GroupNorms. Default 1e-6.
        std_epsilon, std_epsilon_in_variance: `epsilon` and `epsilon_in_variance` of `StdConv2D`.

    Reference: vision_transformer `models_resnet.py`, `ResidualUnit`.
    """

    def __init__(
        self,
        filters,
        strides=1,
        norm_epsilon=1e-6,
        std_epsilon=1e-5,
        std_epsilon_in_variance=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = as_int(filters, "filters")
        self.strides = as_int(strides, "strides")
        self.norm_epsilon = as_positive(norm_epsilon, "norm_epsilon")
        self.std_epsilon = as_positive(std_epsilon, "std_epsilon")
        self.std_epsilon_in_variance = bool(std_epsilon_in_variance)

    def _conv(self, name, filters, size=1, strides=1):
        return StdConv2D(
            filters,
            size,
            strides,
            self.std_epsilon,
            self.std_epsilon_in_variance,
            dtype=self.dtype_policy,
            name=name,
        )

    def _norm(self, name, **kwargs):
        return group_norm(name, self.dtype_policy, self.norm_epsilon, **kwargs)

    def build(self, input_shape):
        self.conv1 = self._conv("conv1", self.filters)
        self.gn1 = self._norm("gn1")
        self.conv2 = self._conv("conv2", self.filters, 3, self.strides)
        self.gn2 = self._norm("gn2")
        self.conv3 = self._conv("conv3", 4 * self.filters)
        # Zero: at the start of training the unit is its shortcut.
        self.gn3 = self._norm("gn3", gamma_initializer="zeros")
        branch = [self.conv1, self.gn1, self.conv2, self.gn2, self.conv3, self.gn3]
        self._build_chain(branch, input_shape)
        self.projects = input_shape[-1] != 4 * self.filters or self.strides != 1
        if self.projects:
            self.conv_proj = self._conv("conv_proj", 4 * self.filters, 1, self.strides)
            self.gn_proj = self._norm("gn_proj")
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
        names = ("filters", "strides", "norm_epsilon", "std_epsilon", "std_epsilon_in_variance")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
