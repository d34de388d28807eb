"""timm's `config.json`, read and written, and what the keys of files without one say of their origin."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_keras import labels
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import Facts
from vit_keras.checkpoints.format import config_choice, config_number, config_pair, config_part
from vit_keras.records import IMAGENET_MEAN, TIMM, Numerics, Preprocessing, Resize, Weights

NUMERICS = Numerics("exact", 1e-6, group_norm_epsilon=1e-5, std_epsilon=1e-8, std_epsilon_in_variance=True)
GELUS = {"gelu": "exact", "gelu_tanh": "tanh"}
POOLINGS = {"token": "token", "avg": "gap", "map": "map", "": None}
# The architectures of timm 1.0.31 that are this library's: plain blocks, exact GELU, LayerNorms of 1e-6. Those of CLIP,
# rope, rpn, xp, DINOv3 and others have keys of the same names and compute otherwise.
_SIZES = "tiny|wee|little|small|mediumd?|betwixt|base|large|huge|giant|giantopt|gigantic|so150m2?|so400m"
_ARCHITECTURES = re.compile(
    rf"vit_({_SIZES})_(patch\d+|r\d+_s\d+|r_s16_p8)(_(plus|gap|map|siglip|dinov2|tipsv2|reg\d|36x1))*(_\d+)?(_miil)?"
    rf"|deit3?_({_SIZES})(_distilled)?_patch\d+_\d+|flexivit_({_SIZES})|eva_large_patch14_\d+|test_vit"
)
# Of the names that timm had before its tags, and still takes.
_OLD_TAG = re.compile(r"(_miil)?_(in21k|in21ft1k|dino|sam)$")
_GATED = re.compile(r"vit_giant_patch14_.*(dinov2|tipsv2).*")
# Of these, those that have the tanh form, though `model_args` need not say so.
_TANH = re.compile(
    r"vit_(base_patch32|giantopt_patch16|so400m_patch16)_siglip_(gap_)?\d+|vit_large_patch16_siglip_(gap_)?512"
)


def known(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """What timm's `config.json` says: `model_args` of the constructor, and `pretrained_cfg`; without it, the origin."""
    if "architecture" not in config:
        if not any(key.endswith("pos_embed") for key in keys):
            raise CheckpointError(NO_POSITIONS)
        return _origin(keys)
    name = config["architecture"]
    if isinstance(name, str):
        name = _OLD_TAG.sub("", name).replace("_resnet50_", "_r50_s16_")
        if _GATED.fullmatch(name):
            raise CheckpointError(f"config.json: {name!r} has gated MLPs (SwiGLU), which are not supported")
    if not isinstance(name, str) or not _ARCHITECTURES.fullmatch(name):
        raise CheckpointError(
            f"config.json: {name!r} is no plain Vision Transformer of timm, such as vit_*, deit_* and deit3_* are; "
            "others may have the same keys and compute otherwise"
        )
    args, pretrained = config_part(config, "model_args"), config_part(config, "pretrained_cfg")
    if not any(key.endswith("pos_embed") for key in keys) and args.get("pos_embed") != "none":
        raise CheckpointError(NO_POSITIONS)
    act = config_choice({"act_layer": args.get("act_layer") or _act_layer(name)}, "act_layer", GELUS)
    pooling = {"global_pool": args.get("global_pool", config.get("global_pool", "token"))}
    result: dict[str, Any] = {
        "preprocessing": preprocessing(pretrained),
        "numerics": dataclasses.replace(NUMERICS, gelu=GELUS[act]),
        "num_heads": config_number(args, "num_heads"),
        "labels": _labels(pretrained),
        "image_size": config_pair(args, "img_size") or _input_size(pretrained),
        "shapes": {
            "width": config_number(args, "embed_dim"),
            "depth": config_number(args, "depth"),
            "patch_size": None if "_r" in name else config_pair(args, "patch_size"),
            "in_channels": config_number(args, "in_chans"),
            "qkv_bias": args.get("qkv_bias"),
        },
    }
    result = {name: value for name, value in result.items() if value is not None}
    if "global_pool" in {**config, **args}:
        result["pooling"] = POOLINGS[config_choice(pooling, "global_pool", POOLINGS)]
    return result


NO_POSITIONS = (
    "There is no pos_embed: the model has rotary positions or others that lie in no array, which are not supported."
)


def _act_layer(architecture: str) -> str:
    return "gelu_tanh" if _TANH.fullmatch(architecture) else "gelu"


def _origin(keys: Collection[str]) -> dict[str, Any]:
    """How facebookresearch's own code treats pixels and positions, where keys show that a file is of it.

    DINO and DINOv2 `vision_transformer.py`, `interpolate_pos_encoding` (DINOv2 with registers has
    `interpolate_antialias`); MAE `util/pos_embed.py`; MoCo v3, built on timm 0.4.9. All see ImageNet's mean and std.
    """

    def has(part: str) -> bool:
        return any(part in key for key in keys)

    if has("register_tokens"):
        resize = Resize("antialiased_bicubic")
    elif has("teacher.") or (has("mask_token") and not has("decoder_")):
        resize = Resize("bicubic", offset=0.1)
    elif has("decoder_") or has("base_encoder."):
        resize = Resize("bicubic")
    else:
        return {}
    return {"resize": resize, "preprocessing": IMAGENET_MEAN}


def _labels(pretrained: Mapping[str, Any]) -> str | tuple[str, ...] | None:
    names = pretrained.get("label_names")
    return labels.known([str(name) for name in names]) if isinstance(names, list) else None


def _input_size(pretrained: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) of `input_size` (C, H, W)."""
    size = pretrained.get("input_size")
    return config_pair({"input_size": size[1:]}, "input_size") if isinstance(size, list) and len(size) == 3 else None


def preprocessing(pretrained: Mapping[str, Any]) -> Preprocessing:
    """timm's `pretrained_cfg`: `mean`, `std`, `crop_pct`, `crop_mode`, `interpolation`, `input_size` (C, H, W)."""
    crop = pretrained.get("crop_pct") or TIMM.crop
    squash = "squash" if crop == 1 else "squash_crop"
    try:
        size = pretrained.get("input_size")
        return dataclasses.replace(
            TIMM,
            resize=squash if pretrained.get("crop_mode") == "squash" else TIMM.resize,
            crop=crop,
            interpolation=pretrained.get("interpolation") or TIMM.interpolation,
            mean=pretrained.get("mean") or TIMM.mean,
            std=pretrained.get("std") or TIMM.std,
            size=None if size is None else (size[1], size[2]),
        )
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"config.json: pretrained_cfg cannot be read ({error})") from None


def pretrained_cfg(facts: Facts, record: Weights, first_conv: str) -> dict[str, Any]:
    """What timm keeps of pixels and heads; `first_conv` names the layer that takes the image."""
    pixels, (low, high) = record.preprocessing, record.preprocessing.value_range
    pretrained = {
        "input_size": [facts.in_channels, *(facts.native_size or pixels.size or ())],
        "mean": [(mean - low) / (high - low) for mean in pixels.mean],
        "std": [std / (high - low) for std in pixels.std],
        "interpolation": pixels.interpolation if pixels.interpolation in ("bicubic", "bilinear") else "bilinear",
        "crop_pct": pixels.crop,
        "crop_mode": "squash" if pixels.resize.startswith("squash") else "center",
        "num_classes": facts.classes or 0,
        "first_conv": first_conv,
        "classifier": ["head", "head_dist"] if facts.distillation else "head",
        "license": "apache-2.0",
    }
    names = labels.of(record.labels, facts.classes)
    if names:
        pretrained["label_names"] = names
    return pretrained
