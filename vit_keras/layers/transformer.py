"""The one block of every model here."""

import keras
from keras import ops

from vit_keras.checks import as_choice, as_int, as_pair, as_positive, as_rate
from vit_keras.layers.attention import MultiHeadSelfAttention, attention_spec
from vit_keras.layers.mlp import MLP
from vit_keras.layers.regularization import DropPath, LayerScale
from vit_keras.spec import GELUS, RELATIVE_POSITIONS


@keras.saving.register_keras_serializable("vit_keras")
class TransformerBlock(keras.layers.Layer):
    """Pre-norm Transformer block: (B, N, D) -> (B, N, D).

    x = x + attention(norm(x)), then x = x + mlp(norm(x)), each branch with optional dropout, layer-scale and
    drop-path.

    ```python
    tokens = TransformerBlock(num_heads=12, mlp_dim=3072)(tokens)
    tokens, scores = TransformerBlock(num_heads=12, mlp_dim=3072)(tokens, return_attention_scores=True)
    ```

    Args:
        num_heads: A, a divisor of D.
        mlp_dim: width of the MLP's hidden layer.
        dropout: rate after the attention's output projection and after both Dense layers of the MLP. Default 0.
        attention_dropout: rate on the attention probabilities. Default 0.
        drop_path: probability that a branch of an image is dropped in training. Default 0.
        layer_scale: initial value of the per-channel factors on both branches; None (default) has none.
        qkv_bias: whether query, key and value have biases. Default True.
        gelu: `"tanh"` (default, the original code's) or `"exact"`.
        epsilon: of the LayerNorms. Default 1e-6.
        position: None (default), `"relative"` or `"relative_bias"`: positions that act inside attention.
        grid, prefix_tokens: (height, width) of the patches and number of tokens before them, for these positions.

    Call arguments:
        inputs: (B, N, D).
        patches: optional map (B, h, w, ...) whose size is the grid, for relative positions at any size.
        return_attention_scores: if True, returns the pair (outputs, probabilities (B, A, N, N) in float32).

    Reference: Dosovitskiy et al. 2021, section 3.1, equations 2 and 3; vision_transformer `models_vit.py`,
        `Encoder1DBlock`.
    """

    def __init__(
        self,
        num_heads,
        mlp_dim,
        dropout=0.0,
        attention_dropout=0.0,
        drop_path=0.0,
        layer_scale=None,
        qkv_bias=True,
        gelu="tanh",
        epsilon=1e-6,
        position=None,
        grid=None,
        prefix_tokens=0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = as_int(num_heads, "num_heads")
        self.mlp_dim = as_int(mlp_dim, "mlp_dim")
        self.dropout = as_rate(dropout, "dropout")
        self.attention_dropout = as_rate(attention_dropout, "attention_dropout")
        self.drop_path = as_rate(drop_path, "drop_path")
        self.layer_scale = None if layer_scale is None else as_positive(layer_scale, "layer_scale")
        self.qkv_bias = bool(qkv_bias)
        self.gelu = as_choice(gelu, "gelu", GELUS)
        self.epsilon = as_positive(epsilon, "epsilon")
        self.position = as_choice(position, "position", (None, *RELATIVE_POSITIONS))
        self.grid = None if grid is None else as_pair(grid, "grid")
        self.prefix_tokens = as_int(prefix_tokens, "prefix_tokens", minimum=0)

    def build(self, inputs_shape, patches_shape=None):
        same = {"dtype": self.dtype_policy}
        norm = keras.layers.LayerNormalization
        self.norm_0 = norm(epsilon=self.epsilon, name="LayerNorm_0", **same)
        self.attention = MultiHeadSelfAttention(
            self.num_heads,
            dropout=self.attention_dropout,
            use_bias=self.qkv_bias,
            position=self.position,
            grid=self.grid,
            prefix_tokens=self.prefix_tokens,
            name="MultiHeadDotProductAttention_0",
            **same,
        )
        self.norm_1 = norm(epsilon=self.epsilon, name="LayerNorm_1", **same)
        self.mlp = MLP(self.mlp_dim, self.dropout, self.gelu, name="MlpBlock_0", **same)
        self.drop = keras.layers.Dropout(self.dropout, name="Dropout_0", **same)
        self.branch_drop = DropPath(self.drop_path, name="DropPath_0", **same)
        self.attention.build(inputs_shape, patches_shape=patches_shape)
        for layer in (self.norm_0, self.norm_1, self.mlp, self.drop, self.branch_drop):
            layer.build(inputs_shape)
        self.scales = []
        if self.layer_scale is not None:
            self.scales = [LayerScale(self.layer_scale, name=f"LayerScale_{i}", **same) for i in (0, 1)]
            for scale in self.scales:
                scale.build(inputs_shape)

    def call(self, inputs, patches=None, return_attention_scores=False, training=None):
        x = self.attention(
            self.norm_0(inputs),
            patches=patches,
            return_attention_scores=return_attention_scores,
            training=training,
        )
        x, scores = x if return_attention_scores else (x, None)
        x = ops.add(inputs, self._branch(self.drop(x, training=training), 0, training))
        y = self.mlp(self.norm_1(x), training=training)
        outputs = ops.add(x, self._branch(y, 1, training))
        return (outputs, scores) if return_attention_scores else outputs

    def _branch(self, x, index, training):
        if self.scales:
            x = self.scales[index](x)
        return self.branch_drop(x, training=training)

    def compute_output_spec(self, inputs, patches=None, return_attention_scores=False, training=None):
        return attention_spec(self, inputs, None, return_attention_scores)

    def get_config(self):
        names = ("num_heads", "mlp_dim", "dropout", "attention_dropout", "drop_path", "layer_scale", "qkv_bias")
        names += ("gelu", "epsilon", "position", "prefix_tokens")
        config = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **config, "grid": self.grid and list(self.grid)}
