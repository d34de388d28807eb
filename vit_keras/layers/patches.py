"""Images and feature maps to patches."""

import json

import keras
from keras import ops

from vit_keras.checks import REMAINDERS, as_choice, as_int, as_pair, grid_of


@keras.saving.register_keras_serializable("vit_keras")
class Patches(keras.layers.Layer):
    """Cuts a map into non-overlapping patches and, with a width, embeds each of them.

    ```python
    Patches(16, width=768)(images)   # (B, 224, 224, 3) -> (B, 14, 14, 768), a convolution
    Patches((8, 16))(images)         # (B, 224, 224, 3) -> (B, 28, 14, 384), raw pixels
    ```

    Args:
        patch_size: patch height and width in pixels of the input map, an integer or a pair.
        width: D, size of the embeddings. None (default) returns the raw values of each patch, ordered
            (row, column, channel) as the kernel is.
        remainder: what to do when the patch does not divide the map: `"error"` (default), `"pad"` with zeros below
            and on the right, or `"crop"` there, as the original code does without saying so.
        record: plain-JSON record of the weights a model was given (`vit_keras.records.Weights`), kept here because this
            layer survives saving, cloning, nesting and surgery. Default None.

    Input: (B, H, W, C). Output: (B, h, w, D), or (B, h, w, ph * pw * C) without a width.

    Raises:
        ValueError: the patch does not divide the map and `remainder="error"`. For sizes unknown until run time the
            backend's reshape raises instead.

    Reference: Dosovitskiy et al. 2021, section 3.1, equation 1; vision_transformer `models_vit.py`, `embedding`.
    """

    def __init__(self, patch_size, width=None, remainder="error", record=None, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = as_pair(patch_size, "patch_size")
        self.width = None if width is None else as_int(width, "width")
        self.remainder = as_choice(remainder, "remainder", REMAINDERS)
        self.record = record

    def build(self, input_shape):
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={-1: input_shape[-1]})
        if self.width is not None:
            shape = (*self.patch_size, input_shape[-1], self.width)
            self.kernel = self.add_weight(shape=shape, initializer="lecun_normal", name="kernel")
            self.bias = self.add_weight(shape=(self.width,), initializer="zeros", name="bias")

    def call(self, inputs):
        inputs = self._whole_patches(inputs)
        if self.width is None:
            return self._raw(inputs)
        # channels_last whatever the user's global data format: every shape of this library is (B, H, W, C).
        outputs = ops.conv(inputs, self.kernel, strides=self.patch_size, padding="valid", data_format="channels_last")
        return ops.add(outputs, self.bias)

    def _whole_patches(self, x):
        ph, pw = self.patch_size
        if self.remainder == "pad":
            # A patch less one pixel, of which the patches then use what completes the last row and column.
            return ops.pad(x, ((0, 0), (0, ph - 1), (0, pw - 1), (0, 0)))
        if self.remainder == "error":
            if None not in x.shape[1:3]:
                grid_of(x.shape[1:3], self.patch_size, self.remainder)
            else:
                # Costs nothing, and fails at run time if a remainder would be dropped.
                _, height, width, _ = ops.shape(x)
                x = ops.reshape(x, (-1, height // ph * ph, width // pw * pw, x.shape[3]))
        return x

    def _raw(self, x):
        ph, pw = self.patch_size
        _, height, width, channels = ops.shape(x)
        h, w = height // ph, width // pw
        x = ops.reshape(x[:, : h * ph, : w * pw], (-1, h, ph, w, pw, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))  # (B, h, w, ph, pw, C)
        return ops.reshape(x, (-1, h, w, ph * pw * channels))

    def compute_output_shape(self, input_shape):
        batch, height, width, channels = input_shape
        size = self.width or self.patch_size[0] * self.patch_size[1] * channels
        if height is None or width is None:
            extra = [patch - 1 if self.remainder == "pad" else 0 for patch in self.patch_size]
            grid = [
                None if length is None else (length + more) // patch
                for length, more, patch in zip((height, width), extra, self.patch_size)
            ]
        else:
            grid = list(grid_of((height, width), self.patch_size, self.remainder))
        return (batch, *grid, size)

    def get_config(self):
        config = {
            "patch_size": list(self.patch_size),
            "width": self.width,
            "remainder": self.remainder,
            # Keras tracks dicts in a class of its own; configs are plain.
            "record": None if self.record is None else json.loads(json.dumps(self.record)),
        }
        return {**super().get_config(), **config}
