"""The Vision Transformer, from top to bottom.

An image is cut into patches, each patch becomes a token, a class token joins, positions are added, L Transformer
blocks follow, and the head reads the class token (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words",
arXiv 2010.11929, section 3.1). `build_model` builds any size of it; `vit_ti16` … `vit_bigg14` the published ones.
"""

from typing import Any

import keras

from vit_keras import layers
from vit_keras.preprocessing import preprocess_inputs as preprocess_inputs
from vit_keras.spec import RELATIVE_POSITIONS, TABLE_POSITIONS, Variant, ViTSpec
from vit_keras.variants import constructor

# One line a model: size (width, depth, MLP and heads are in `spec.SIZES`), patch, default image size. Sizes and
# patches: Dosovitskiy et al. 2021, table 1, and vision_transformer `configs/models.py`; 14-pixel patches: Zhai et al.
# 2022. The old vit-keras package began 384 pixels at L; 392 is the nearest size that 14 divides. `vit_mini` is this
# project's own, for Fashion-MNIST (`examples/fashion_mnist.py`).
VARIANTS = {
    "vit_mini": Variant("mini", 4, 28, classes=10, weights="fashion_mnist"),
    "vit_ti16": Variant("Ti", 16, 224),
    "vit_s16": Variant("S", 16, 224),
    "vit_s32": Variant("S", 32, 224),
    "vit_b8": Variant("B", 8, 224),
    "vit_b16": Variant("B", 16, 224),
    "vit_b32": Variant("B", 32, 224),
    "vit_l16": Variant("L", 16, 384),
    "vit_l32": Variant("L", 32, 384),
    "vit_so400m14": Variant("So400m", 14, 392),
    "vit_h14": Variant("H", 14, 392),
    "vit_g14": Variant("g", 14, 392),
    "vit_bigg14": Variant("G", 14, 392),
}

# Parameters at 224 pixels with 1,000 classes: vision_transformer `models_test.py`; the last, by the same formula.
PARAMETERS = {
    "vit_mini": 702_280,
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_s32": 22_878_952,
    "vit_b8": 86_576_872,
    "vit_b16": 86_567_656,
    "vit_b32": 88_224_232,
    "vit_l16": 304_326_632,
    "vit_l32": 306_535_400,
    "vit_so400m14": 413_597_656,
    "vit_h14": 632_045_800,
    "vit_g14": 1_012_611_432,
    "vit_bigg14": 1_844_440_680,
}


def build_model(
    image_size: Any,
    patch_size: Any,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    name: str,
    mlp_dim: int,
    classes: int,
    dropout: float = 0.0,
    activation: Any = "linear",
    include_top: bool = True,
    representation_size: int | None = None,
    **options: Any,
) -> keras.Model:
    """Build a Vision Transformer of any size, with new weights.

    ```python
    model = build_model(32, 8, num_layers=2, hidden_size=32, num_heads=4, name="tiny", mlp_dim=64, classes=5)
    ```

    Args:
        image_size: height and width of the images in pixels: an integer, a pair (height, width), or None for a model
            that takes any size at call time.
        patch_size: height and width of a patch in pixels, an integer or a pair.
        num_layers: L, number of Transformer blocks.
        hidden_size: D, width of the tokens.
        num_heads: A, number of attention heads, a divisor of D.
        name: of the model.
        mlp_dim: hidden width of the blocks' MLPs.
        classes: K, outputs of the head.
        dropout: rate after the position embeddings and, in the blocks, after attention and both MLP layers.
        activation: of the head. Default `"linear"`: the outputs are logits.
        include_top: whether the head is built. Without it the outputs are the features it would read.
        representation_size: width of a Dense layer with tanh before the head (`pre_logits`, in the weights trained on
            ImageNet-21k alone); None (default) or 0 has none.
        native_size: with `image_size=None`, the image size whose position table is stored; other sizes interpolate
            it. Default 224.
        in_channels: channels of the images. Default 3.
        pooling: what the head reads: `"token"` (default) the class token, `"gap"` the mean of the patch tokens,
            `"map"` attention pooling, `"token_gap"` class token and mean, concatenated, `"both"` class and
            distillation token, None every token.
        norm_after_pooling: whether the last LayerNorm stands behind the pooling, as in fine-tuned MAE, and not before
            it. Default False.
        class_token: whether there is a class token. Default: exactly when the pooling reads it.
        distillation: whether there is a distillation token with a head of its own, as in DeiT: in training the outputs
            are those of both heads, (B, 2, K), else their mean, (B, K); with `pooling="both"` always both. `"token"`
            has the token without its head. Default False.
        class_position: whether the class token has a row in the position table (default, the original), or positions
            are added to the patches before it joins (False, big_vision).
        position: `"learned_1d"` (default), `"learned_2d"`, `"sincos_2d"`, `"relative"`, `"relative_bias"` or
            `"none"`; see `layers.AddPositionEmbs` and `layers.RelativePositions`.
        registers: number of register tokens. Default 0.
        attention_dropout: rate on the attention probabilities. Default 0.
        drop_path: stochastic depth rate of the last block; earlier blocks have linearly less. Default 0.
        layer_scale: initial value of layer-scale; None (default) has none.
        qkv_bias: whether query, key and value have biases. Default True.
        gelu: `"tanh"` (default, the original weights') or `"exact"` (timm's and Hugging Face's).
        epsilon: of the LayerNorms. Default 1e-6.
        head_bias: initial bias of the head. Default 0; -10 in the paper's ImageNet-21k pre-training.
        remainder: for sizes the patch does not divide: `"error"` (default), `"pad"` or `"crop"`.
        dtype: dtype or dtype policy of the layers, such as `"mixed_bfloat16"`. Default: Keras' global policy.

    Returns:
        A functional `keras.Model`: (B, H, W, C) -> (B, K), or (B, N, K) with `pooling=None`.

    Raises:
        ValueError: an argument is out of its range, or the patch does not divide the image.
    """
    spec = ViTSpec.of(
        image_size=image_size,
        patch_size=patch_size,
        depth=num_layers,
        width=hidden_size,
        num_heads=num_heads,
        name=name,
        mlp_dim=mlp_dim,
        classes=classes,
        dropout=dropout,
        activation=activation,
        include_top=include_top,
        representation_size=representation_size,
        **options,
    )
    return build(spec)


def build(spec: ViTSpec) -> keras.Model:
    """The model of a spec without a stem: patches are cut from the images themselves."""
    images = image_input(spec)
    return transformer(spec, images, images)


def image_input(spec: ViTSpec) -> keras.KerasTensor:
    """The model's input (B, H, W, C)."""
    return keras.Input((*(spec.image_size or (None, None)), spec.in_channels), name="images", dtype="float32")


def transformer(spec: ViTSpec, images: keras.KerasTensor, features: keras.KerasTensor) -> keras.Model:
    """The Vision Transformer on a map of features (B, H, W, C): the images themselves, or a stem's output."""
    patches = layers.Patches(spec.patch_size, spec.width, spec.remainder, name="embedding", dtype=spec.dtype)(features)
    tokens = keras.layers.Reshape((-1, spec.width), name="tokens", dtype=spec.dtype)(patches)  # (B, h * w, D)
    tokens = add_prefix_and_positions(spec, tokens, patches)  # (B, N, D)
    tokens = keras.layers.Dropout(spec.dropout, name="Transformer_dropout", dtype=spec.dtype)(tokens)

    for index in range(spec.depth):
        block = transformer_block(spec, index)
        tokens = block(tokens, patches=patches) if spec.position in RELATIVE_POSITIONS else block(tokens)
    name = "pooled_norm" if spec.norm_after_pooling else "Transformer_encoder_norm"
    norm = keras.layers.LayerNormalization(epsilon=spec.epsilon, name=name, dtype=spec.dtype)
    if spec.distillation is True:
        return keras.Model(images, distilled_outputs(spec, norm(tokens)), name=spec.name)
    outputs = norm(pool(spec, tokens)) if spec.norm_after_pooling else pool(spec, norm(tokens))  # (B, D)
    if spec.representation_size:
        pre_logits = keras.layers.Dense(
            spec.representation_size,
            activation="tanh",
            kernel_initializer="lecun_normal",
            name="pre_logits",
            dtype=spec.dtype,
        )
        outputs = pre_logits(outputs)
    if spec.include_top:
        outputs = head(spec)(outputs)  # (B, K)
    return keras.Model(images, outputs, name=spec.name)


def add_prefix_and_positions(spec: ViTSpec, tokens: keras.KerasTensor, patches: keras.KerasTensor) -> keras.KerasTensor:
    """Patch tokens (B, h * w, D) to the sequence (B, N, D): class and distillation token, positions, registers."""

    def add_positions(tokens, prefix_tokens):
        add = layers.AddPositionEmbs(
            spec.position,
            grid=spec.grid,
            prefix_tokens=prefix_tokens,
            name="Transformer_posembed_input",
            dtype=spec.dtype,
        )
        return add(tokens, patches=patches)

    has_table = spec.position in TABLE_POSITIONS
    if has_table and not spec.class_position:
        tokens = add_positions(tokens, prefix_tokens=0)
    if spec.class_token:
        tokens = layers.ClassToken(name="class_token", dtype=spec.dtype)(tokens)
    if spec.distillation:
        tokens = layers.DistillationToken(name="distillation_token", dtype=spec.dtype)(tokens)
    if has_table and spec.class_position:
        tokens = add_positions(tokens, prefix_tokens=spec.prefix_rows)
    if spec.registers:
        index = spec.prefix_tokens - spec.registers
        tokens = layers.RegisterTokens(spec.registers, index, name="registers", dtype=spec.dtype)(tokens)
    return tokens


def transformer_block(spec: ViTSpec, index: int) -> layers.TransformerBlock:
    """The block number `index`."""
    relative = spec.position in RELATIVE_POSITIONS
    return layers.TransformerBlock(
        num_heads=spec.num_heads,
        mlp_dim=spec.mlp_dim,
        dropout=spec.dropout,
        attention_dropout=spec.attention_dropout,
        drop_path=spec.drop_path * index / max(spec.depth - 1, 1),
        layer_scale=spec.layer_scale,
        qkv_bias=spec.qkv_bias,
        gelu=spec.gelu,
        epsilon=spec.epsilon,
        position=spec.position if relative else None,
        grid=spec.grid if relative else None,
        prefix_tokens=spec.prefix_tokens if relative else 0,
        name=f"Transformer_encoderblock_{index}",
        dtype=spec.dtype,
    )


def pool(spec: ViTSpec, tokens: keras.KerasTensor) -> keras.KerasTensor:
    """What the head reads, from the normed tokens (B, N, D)."""
    if spec.pooling is None:
        return tokens
    if spec.pooling == "map":
        map_head = layers.AttentionPooling(
            spec.num_heads, spec.mlp_dim, spec.gelu, spec.epsilon, name="MAPHead_0", dtype=spec.dtype
        )
        return map_head(tokens)
    name = {"token": "ExtractToken", "gap": "MeanTokens", "token_gap": "ExtractTokenAndMean"}[spec.pooling]
    return layers.TokenPooling(spec.pooling, spec.prefix_tokens, name=name, dtype=spec.dtype)(tokens)


def distilled_outputs(spec: ViTSpec, tokens: keras.KerasTensor) -> keras.KerasTensor:
    """What class and distillation token say, (B, K), from the normed tokens; without heads, (B, D)."""
    outputs = []
    for pooling, pool_name, head_name in (
        ("token", "ExtractToken", "head"),
        ("distillation", "ExtractDistillationToken", "head_dist"),
    ):
        features = layers.TokenPooling(pooling, name=pool_name, dtype=spec.dtype)(tokens)
        outputs.append(head(spec, head_name)(features) if spec.include_top else features)
    dtype = head_dtype(spec) if spec.include_top else spec.dtype
    return layers.DistilledOutputs(spec.pooling == "both", name="distilled_outputs", dtype=dtype)(*outputs)


def head(spec: ViTSpec, name: str = "head") -> keras.layers.Dense:
    """A new head: zero, so that training starts from the features as they are."""
    return keras.layers.Dense(
        spec.classes,
        activation=spec.activation,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(spec.head_bias),
        name=name,
        dtype=head_dtype(spec),
    )


def head_dtype(spec: ViTSpec) -> Any:
    """The dtype policy of heads: their outputs are never 16-bit."""
    policy = keras.dtype_policies.get(spec.dtype or keras.config.dtype_policy())
    return "float32" if policy.compute_dtype in ("float16", "bfloat16") else policy


vit_mini = constructor("vit_mini", VARIANTS["vit_mini"], build)
vit_ti16 = constructor("vit_ti16", VARIANTS["vit_ti16"], build)
vit_s16 = constructor("vit_s16", VARIANTS["vit_s16"], build)
vit_s32 = constructor("vit_s32", VARIANTS["vit_s32"], build)
vit_b8 = constructor("vit_b8", VARIANTS["vit_b8"], build)
vit_b16 = constructor("vit_b16", VARIANTS["vit_b16"], build)
vit_b32 = constructor("vit_b32", VARIANTS["vit_b32"], build)
vit_l16 = constructor("vit_l16", VARIANTS["vit_l16"], build)
vit_l32 = constructor("vit_l32", VARIANTS["vit_l32"], build)
vit_so400m14 = constructor("vit_so400m14", VARIANTS["vit_so400m14"], build)
vit_h14 = constructor("vit_h14", VARIANTS["vit_h14"], build)
vit_g14 = constructor("vit_g14", VARIANTS["vit_g14"], build)
vit_bigg14 = constructor("vit_bigg14", VARIANTS["vit_bigg14"], build)
