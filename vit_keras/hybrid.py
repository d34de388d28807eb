"""Hybrids: a ResNet stem whose feature map, not the image, is cut into patches for a Vision Transformer.

The stem is BiT's: weight-standardised convolutions, GroupNorm, post-activation bottlenecks (Dosovitskiy et al. 2021,
section 3.1, "Hybrid Architecture", and section 4.1). What follows it is `vit.transformer`.
"""

from collections.abc import Sequence
from typing import Any

import keras

from vit_keras import layers
from vit_keras.spec import Stem, Variant, ViTSpec
from vit_keras.variants import constructor, merge_stages
from vit_keras.vit import image_input, transformer

# One line a model: Transformer size, patch in pixels of the stem's map, default image size, units per ResNet stage,
# last stage used. vision_transformer `configs/models.py`; R50+ViT-B_16 has (3, 4, 9): the six units of R50's third
# stage and the three of its fourth. r_ti16 is the root alone, 1/4 of the image, so its patches are 32 image pixels.
VARIANTS = {
    "r_ti16": Variant("Ti", 8, 224, stem_layers=()),
    "r26_s32": Variant("S", 1, 224, stem_layers=(2, 2, 2, 2), stage=4),
    "r26_b32": Variant("B", 1, 224, stem_layers=(2, 2, 2, 2), stage=4),
    "r50_b16": Variant("B", 1, 224, stem_layers=(3, 4, 6, 3), stage=3),
    "r50_l32": Variant("L", 1, 384, stem_layers=(3, 4, 6, 3), stage=4),
}

# Parameters at 224 pixels with 1,000 classes: vision_transformer `models_test.py`.
PARAMETERS = {
    "r_ti16": 6_337_704,
    "r26_s32": 36_431_912,
    "r26_b32": 101_383_976,
    "r50_b16": 98_659_112,
    "r50_l32": 328_994_856,
}


def build_model(
    image_size: Any,
    patch_size: Any,
    stem_layers: Sequence[int],
    num_layers: int,
    hidden_size: int,
    *,
    width_factor: float = 1.0,
    stage: int | None = None,
    **options: Any,
) -> keras.Model:
    """Build a hybrid of any size, with new weights.

    Args:
        stem_layers: bottleneck units per ResNet stage, such as (3, 4, 6, 3); `()` is the root alone.
        patch_size: height and width of a patch in pixels of the stem's map.
        width_factor: multiplies the stem's channels, 64 at the root. Default 1.
        stage: last of four stages that is used: 4 feeds the stage-4 map (1/32 of the image), 3 the map of stage 3
            (1/16) with the fourth stage's units added to it, as in the paper. None (default): `stem_layers` as given.
        image_size, num_layers, hidden_size, **options: as in `vit_keras.vit.build_model`.

    Returns:
        A functional `keras.Model`: (B, H, W, C) -> (B, K).

    Raises:
        ValueError: an argument is out of its range, or the patch does not divide the stem's map.
    """
    stem = Stem(merge_stages(tuple(stem_layers), stage), width_factor)
    spec = ViTSpec.of(
        image_size=image_size, patch_size=patch_size, depth=num_layers, width=hidden_size, stem=stem, **options
    )
    return build(spec)


def build(spec: ViTSpec) -> keras.Model:
    """The model of a spec with a stem."""
    images = image_input(spec)
    return transformer(spec, images, resnet(spec, images))


def resnet(spec: ViTSpec, images: keras.KerasTensor) -> keras.KerasTensor:
    """The stem: images (B, H, W, C) to its map (B, H / stride, W / stride, channels)."""
    stem, dtype = spec.stem, spec.dtype
    assert stem is not None
    if stem.grey_as_rgb and spec.in_channels == 1:
        images = keras.layers.Concatenate(name="grey_as_rgb", dtype=dtype)([images] * 3)
    std = {"std_epsilon": stem.std_epsilon, "std_epsilon_in_variance": stem.std_epsilon_in_variance}
    root = layers.StdConv2D(stem.width, 7, 2, *std.values(), name="conv_root", dtype=dtype)
    x = root(images)
    x = layers.group_norm("gn_root", dtype, stem.group_norm_epsilon)(x)
    x = keras.layers.ReLU(name="relu_root", dtype=dtype)(x)
    pool = keras.layers.MaxPooling2D(
        3, strides=2, padding="same", data_format="channels_last", name="pool_root", dtype=dtype
    )
    x = pool(x)
    for block, units in enumerate(stem.layers, start=1):
        for unit in range(1, units + 1):
            strides = 2 if block > 1 and unit == 1 else 1
            bottleneck = layers.Bottleneck(
                stem.width * 2 ** (block - 1),
                strides,
                stem.group_norm_epsilon,
                **std,
                name=f"block{block}_unit{unit}",
                dtype=dtype,
            )
            x = bottleneck(x)
    return x


r_ti16 = constructor("r_ti16", VARIANTS["r_ti16"], build)
r26_s32 = constructor("r26_s32", VARIANTS["r26_s32"], build)
r26_b32 = constructor("r26_b32", VARIANTS["r26_b32"], build)
r50_b16 = constructor("r50_b16", VARIANTS["r50_b16"], build)
r50_l32 = constructor("r50_l32", VARIANTS["r50_l32"], build)
