"""Tokens that are not patches, and how a sequence of tokens becomes one vector."""

import keras
from keras import ops

from vit_keras.checks import as_choice, as_int, as_positive
from vit_keras.layers.attention import MultiHeadSelfAttention
from vit_keras.layers.mlp import MLP
from vit_keras.spec import GELUS


class _LearnedTokens(keras.layers.Layer):
    """Base of the layers that insert learned tokens (1, n, D) into a sequence, the same for each image."""

    def _insert(self, inputs, tokens, index):
        """(B, N, D) -> (B, N + n, D), the tokens standing from `index` on."""
        tokens = ops.cast(tokens, inputs.dtype)
        tokens = ops.broadcast_to(tokens, (ops.shape(inputs)[0], *tokens.shape[1:]))
        if index == 0:
            return ops.concatenate([tokens, inputs], axis=1)
        return ops.concatenate([inputs[:, :index], tokens, inputs[:, index:]], axis=1)

    def compute_output_shape(self, input_shape):
        batch, tokens, width = input_shape
        return (batch, tokens and tokens + self.num_tokens, width)


@keras.saving.register_keras_serializable("vit_keras")
class ClassToken(_LearnedTokens):
    """Puts a learned token, zero at first, in front of the sequence: (B, N, D) -> (B, N + 1, D).

    Reference: Dosovitskiy et al. 2021, section 3.1, equation 1; vision_transformer `models_vit.py`, `cls`.
    """

    num_tokens = 1

    def build(self, input_shape):
        self.cls = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros", name="cls")

    def call(self, inputs):
        return self._insert(inputs, self.cls, 0)


@keras.saving.register_keras_serializable("vit_keras")
class DistillationToken(_LearnedTokens):
    """Inserts a learned token behind the class token: (B, N, D) -> (B, N + 1, D).

    Reference: Touvron et al. 2021, "Training data-efficient image transformers & distillation through attention"
        (arXiv 2012.12877), section 4.
    """

    num_tokens = 1

    def build(self, input_shape):
        initializer = keras.initializers.TruncatedNormal(stddev=0.02)  # DeiT's `dist_token`
        self.dist = self.add_weight(shape=(1, 1, input_shape[-1]), initializer=initializer, name="dist")

    def call(self, inputs):
        return self._insert(inputs, self.dist, 1)


@keras.saving.register_keras_serializable("vit_keras")
class DistilledOutputs(keras.layers.Layer):
    """What a distilled model says: in training the outputs of both heads, (B, 2, K), class head first; else their mean.

    Args:
        both: whether both are given outside of training too. Default False.

    Call arguments:
        class_outputs, distilled_outputs: (B, K), of the head on the class token and on the distillation token.

    Reference: facebookresearch/deit `models.py`, `DistilledVisionTransformer.forward`.
    """

    def __init__(self, both=False, **kwargs):
        super().__init__(**kwargs)
        self.both = bool(both)

    def call(self, class_outputs, distilled_outputs, training=None):
        if training or self.both:
            return ops.stack([class_outputs, distilled_outputs], axis=1)
        return (class_outputs + distilled_outputs) / 2

    def compute_output_shape(self, class_outputs_shape, distilled_outputs_shape):
        batch, classes = class_outputs_shape
        return (batch, 2, classes) if self.both else (batch, classes)

    def get_config(self):
        return {**super().get_config(), "both": self.both}


@keras.saving.register_keras_serializable("vit_keras")
class RegisterTokens(_LearnedTokens):
    """Inserts learned register tokens: (B, N, D) -> (B, N + num_tokens, D).

    Args:
        num_tokens: how many.
        index: place of the first one; 1 (default) is behind the class token.

    Reference: Darcet et al. 2024, "Vision Transformers Need Registers" (arXiv 2309.16588), section 2.2.
    """

    def __init__(self, num_tokens, index=1, **kwargs):
        super().__init__(**kwargs)
        self.num_tokens = as_int(num_tokens, "num_tokens")
        self.index = as_int(index, "index", minimum=0)

    def build(self, input_shape):
        # Not zeros: equal registers would get equal gradients and stay equal. The deviation is DINOv2's.
        self.registers = self.add_weight(
            shape=(1, self.num_tokens, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=1e-6),
            name="registers",
        )

    def call(self, inputs):
        return self._insert(inputs, self.registers, self.index)

    def get_config(self):
        return {**super().get_config(), "num_tokens": self.num_tokens, "index": self.index}


@keras.saving.register_keras_serializable("vit_keras")
class TokenPooling(keras.layers.Layer):
    """One vector an image from its tokens: (B, N, D) -> (B, D), or (B, 2 D) with `"token_gap"`.

    Args:
        pooling: `"token"` takes the first token, `"distillation"` the second, `"gap"` the mean of the patch tokens,
            `"token_gap"` the first token and that mean, concatenated.
        prefix_tokens: number of tokens before the patch tokens, which the mean leaves out. Default 0.
    """

    def __init__(self, pooling="token", prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        self.pooling = as_choice(pooling, "pooling", ("token", "distillation", "gap", "token_gap"))
        self.prefix_tokens = as_int(prefix_tokens, "prefix_tokens", minimum=0)

    def call(self, inputs):
        if self.pooling in ("token", "distillation"):
            return inputs[:, 0 if self.pooling == "token" else 1]
        mean = ops.mean(inputs[:, self.prefix_tokens :], axis=1)
        return ops.concatenate([inputs[:, 0], mean], axis=-1) if self.pooling == "token_gap" else mean

    def compute_output_shape(self, input_shape):
        batch, _, width = input_shape
        return (batch, 2 * width if self.pooling == "token_gap" else width)

    def get_config(self):
        return {**super().get_config(), "pooling": self.pooling, "prefix_tokens": self.prefix_tokens}


@keras.saving.register_keras_serializable("vit_keras")
class AttentionPooling(keras.layers.Layer):
    """Multi-head attention pooling: one learned query looks at all tokens, then an MLP: (B, N, D) -> (B, D).

    Args:
        num_heads: number of attention heads, a divisor of D.
        mlp_dim: width of the MLP's hidden layer.
        gelu: `"tanh"` (default) or `"exact"`.
        epsilon: of the LayerNorm, default 1e-6.

    Reference: Zhai et al. 2022, "Scaling Vision Transformers", section 2.3 (MAP head); big_vision `models/vit.py`,
        `MAPHead`.
    """

    def __init__(self, num_heads, mlp_dim, gelu="tanh", epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = as_int(num_heads, "num_heads")
        self.mlp_dim = as_int(mlp_dim, "mlp_dim")
        self.gelu = as_choice(gelu, "gelu", GELUS)
        self.epsilon = as_positive(epsilon, "epsilon")

    def build(self, input_shape):
        width = input_shape[-1]
        self.probe = self.add_weight(shape=(1, 1, width), initializer="glorot_uniform", name="probe")
        self.attention = MultiHeadSelfAttention(
            self.num_heads, dtype=self.dtype_policy, name="MultiHeadDotProductAttention_0"
        )
        self.norm = keras.layers.LayerNormalization(epsilon=self.epsilon, dtype=self.dtype_policy, name="LayerNorm_0")
        self.mlp = MLP(self.mlp_dim, gelu=self.gelu, dtype=self.dtype_policy, name="MlpBlock_0")
        self.attention.build(input_shape)
        for layer in (self.norm, self.mlp):
            layer.build((input_shape[0], 1, width))

    def call(self, inputs, training=None):
        probe = ops.cast(self.probe, inputs.dtype)
        probe = ops.broadcast_to(probe, (ops.shape(inputs)[0], *probe.shape[1:]))
        x = self.attention(probe, memory=inputs, training=training)
        x = x + self.mlp(self.norm(x), training=training)
        return x[:, 0]

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[-1])

    def get_config(self):
        config = {
            "num_heads": self.num_heads,
            "mlp_dim": self.mlp_dim,
            "gelu": self.gelu,
            "epsilon": self.epsilon,
        }
        return {**super().get_config(), **config}
