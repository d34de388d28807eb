"""Multi-head self-attention."""

import keras
from keras import ops

from vit_keras.checks import as_choice, as_int, as_pair, as_rate
from vit_keras.layers.positions import RelativePositions
from vit_keras.spec import RELATIVE_POSITIONS


def attention_spec(layer, inputs, memory, return_attention_scores):
    """Symbolic outputs of a layer that attends: said instead of traced, which makes building models much faster."""
    outputs = keras.KerasTensor(inputs.shape, dtype=layer.compute_dtype)
    if not return_attention_scores:
        return outputs
    batch, tokens = inputs.shape[:2]
    shape = (batch, layer.num_heads, tokens, tokens if memory is None else memory.shape[1])
    return outputs, keras.KerasTensor(shape, dtype=keras.backend.result_type(layer.compute_dtype, "float32"))


@keras.saving.register_keras_serializable("vit_keras")
class MultiHeadSelfAttention(keras.layers.Layer):
    """Multi-head attention of a sequence to itself: (B, N, D) -> (B, N, D).

    Args:
        num_heads: A, a divisor of D.
        dropout: rate on the attention probabilities. Default 0.
        use_bias: whether query, key and value have biases. Default True. The output projection always has one.
        position: None (default), `"relative"` or `"relative_bias"`, see `RelativePositions`.
        grid, prefix_tokens: of the patches, for the relative positions.

    Call arguments:
        inputs: (B, N, D).
        memory: optional (B, M, D), attended to instead of the inputs.
        patches: optional map (B, h, w, ...) whose size is the grid, for relative positions at any size.
        return_attention_scores: if True, returns the pair (outputs, probabilities (B, A, N, M)).

    Raises:
        ValueError: A does not divide D.

    Reference: Dosovitskiy et al. 2021, appendix A; flax `MultiHeadDotProductAttention`.
    """

    def __init__(self, num_heads, dropout=0.0, use_bias=True, position=None, grid=None, prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = as_int(num_heads, "num_heads")
        self.dropout = as_rate(dropout, "dropout")
        self.use_bias = bool(use_bias)
        self.position = as_choice(position, "position", (None, *RELATIVE_POSITIONS))
        self.grid = None if grid is None else as_pair(grid, "grid")
        self.prefix_tokens = as_int(prefix_tokens, "prefix_tokens", minimum=0)

    def build(self, inputs_shape, memory_shape=None, patches_shape=None):
        width = inputs_shape[-1]
        if width % self.num_heads:
            raise ValueError(
                f"The width of the tokens must be divisible by the number of heads. Received: width {width}, "
                f"num_heads={self.num_heads}"
            )
        self.head_dim = width // self.num_heads
        self.query, self.key, self.value = (self._dense(width, name) for name in ("query", "key", "value"))
        self.out = self._dense(width, "out")
        for dense in (self.query, self.key, self.value, self.out):
            dense.build((*inputs_shape[:-1], width))
        self.drop = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy, name="Dropout_0")
        self.drop.build((inputs_shape[0], self.num_heads, inputs_shape[1], None))
        if self.position:
            self.relative = RelativePositions(
                self.position, self.grid, self.prefix_tokens, dtype=self.dtype_policy, name="relative_positions"
            )
            query_shape = (inputs_shape[0], self.num_heads, inputs_shape[1], self.head_dim)
            self.relative.build(query_shape, patches_shape)

    def _dense(self, width, name):
        return keras.layers.Dense(
            width,
            use_bias=self.use_bias or name == "out",
            kernel_initializer="glorot_uniform",
            dtype=self.dtype_policy,
            name=name,
        )

    def call(self, inputs, memory=None, patches=None, return_attention_scores=False, training=None):
        memory = inputs if memory is None else memory
        query = self._heads(self.query(inputs) * (self.head_dim**-0.5))  # (B, A, N, d)
        key, value = self._heads(self.key(memory)), self._heads(self.value(memory))  # (B, A, M, d)
        probabilities = ops.softmax(self._scores(query, key, patches), axis=-1)
        weights = self.drop(ops.cast(probabilities, value.dtype), training=training)
        outputs = ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3))  # (B, N, A, d)
        outputs = self.out(ops.reshape(outputs, (-1, ops.shape(outputs)[1], self.num_heads * self.head_dim)))
        return (outputs, probabilities) if return_attention_scores else outputs

    def _heads(self, x):
        """(B, N, D) -> (B, A, N, d)."""
        x = ops.reshape(x, (-1, ops.shape(x)[1], self.num_heads, self.head_dim))
        return ops.transpose(x, (0, 2, 1, 3))

    def _scores(self, query, key, patches):
        """Scores (B, A, N, M) in float32."""
        if keras.backend.standardize_dtype(query.dtype) == "float16":
            # Scores of trained models exceed 65,504, the largest float16.
            query, key = ops.cast(query, "float32"), ops.cast(key, "float32")
        scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2)))
        if self.position:
            scores = ops.add(scores, ops.cast(self.relative(query, patches=patches), scores.dtype))
        dtype = keras.backend.result_type(scores.dtype, "float32")
        return ops.cast(scores, dtype)

    def compute_output_spec(self, inputs, memory=None, patches=None, return_attention_scores=False, training=None):
        return attention_spec(self, inputs, memory, return_attention_scores)

    def get_config(self):
        config = {
            "num_heads": self.num_heads,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "position": self.position,
            "grid": self.grid and list(self.grid),
            "prefix_tokens": self.prefix_tokens,
        }
        return {**super().get_config(), **config}
