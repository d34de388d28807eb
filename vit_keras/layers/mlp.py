"""The block's multi-layer perceptron."""

import math

import keras
from keras import ops

from vit_keras.checks import as_choice, as_int, as_rate
from vit_keras.spec import GELUS


def gelu(x, form="tanh"):
    """GELU in the form the weights were trained with: they differ by up to 4.7e-4 per activation.

    Args:
        x: tensor of any shape.
        form: `"tanh"`, the approximation that `jax.nn.gelu` is by default, or `"exact"`, with the error function.

    Reference: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2.
    """
    if form == "tanh":
        return ops.gelu(x, approximate=True)
    # Written out: ONNX runtimes lack the Erfc of ops.gelu, and in bfloat16 on CPUs this is the faster form.
    return 0.5 * x * (1.0 + ops.erf(x * (1.0 / math.sqrt(2.0))))


@keras.saving.register_keras_serializable("vit_keras")
class MLP(keras.layers.Layer):
    """Dense, GELU, dropout, Dense back to the input's width, dropout: (..., D) -> (..., D).

    Args:
        mlp_dim: width of the hidden layer.
        dropout: rate after each of the two Dense layers. Default 0.
        gelu: `"tanh"` (default) or `"exact"`.

    Reference: vision_transformer `models_vit.py`, `MlpBlock`.
    """

    def __init__(self, mlp_dim, dropout=0.0, gelu="tanh", **kwargs):
        super().__init__(**kwargs)
        self.mlp_dim = as_int(mlp_dim, "mlp_dim")
        self.dropout = as_rate(dropout, "dropout")
        self.gelu = as_choice(gelu, "gelu", GELUS)

    def build(self, input_shape):
        self.dense_0 = self._dense(self.mlp_dim, "Dense_0")
        self.dense_1 = self._dense(input_shape[-1], "Dense_1")
        self.drop = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy, name="Dropout_0")
        self.dense_0.build(input_shape)
        self.dense_1.build((*input_shape[:-1], self.mlp_dim))
        self.drop.build(input_shape)

    def _dense(self, units, name):
        return keras.layers.Dense(
            units,
            kernel_initializer="glorot_uniform",
            bias_initializer=keras.initializers.RandomNormal(stddev=1e-6),
            dtype=self.dtype_policy,
            name=name,
        )

    def call(self, inputs, training=None):
        x = self.drop(gelu(self.dense_0(inputs), self.gelu), training=training)
        return self.drop(self.dense_1(x), training=training)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "mlp_dim": self.mlp_dim, "dropout": self.dropout, "gelu": self.gelu}
