"""Stochastic depth and layer-scale: what stands on the residual branches of deep Transformers."""

import keras
from keras import ops

from vit_keras.checks import as_positive, as_rate


@keras.saving.register_keras_serializable("vit_keras")
class DropPath(keras.layers.Layer):
    """Stochastic depth: in training, drops the whole branch of an image and scales the others up.

    Args:
        rate: probability that a branch is dropped.
        seed: of the random masks. Default None.

    Reference: Huang et al. 2016 (arXiv 1603.09382), section 3, in the per-image form that ViTs use.
    """

    def __init__(self, rate, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.rate = as_rate(rate, "rate")
        self.seed = seed
        if self.rate:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs, training=None):
        if not training or not self.rate:
            return inputs
        mask_shape = (ops.shape(inputs)[0],) + (1,) * (len(inputs.shape) - 1)
        return keras.random.dropout(inputs, self.rate, noise_shape=mask_shape, seed=self.seed_generator)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


@keras.saving.register_keras_serializable("vit_keras")
class LayerScale(keras.layers.Layer):
    """Multiplies each channel by a learned factor, small at first.

    Args:
        initial_value: of every factor, 1e-5 or 1e-6 in deep models.

    Reference: Touvron et al. 2021, "Going deeper with Image Transformers" (arXiv 2103.17239), section 2.
    """

    def __init__(self, initial_value=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.initial_value = as_positive(initial_value, "initial_value")

    def build(self, input_shape):
        initializer = keras.initializers.Constant(self.initial_value)
        self.gamma = self.add_weight(shape=(input_shape[-1],), initializer=initializer, name="gamma")

    def call(self, inputs):
        return ops.multiply(inputs, self.gamma)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "initial_value": self.initial_value}
