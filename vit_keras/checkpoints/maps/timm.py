"""timm's Vision Transformers and hybrids, and the PyTorch state dicts whose keys they share.

Covers `VisionTransformer`, `VisionTransformerDistilled` and hybrids of timm; MAE, MoCo v3, DINO and DINOv2 of
facebookresearch, whose keys are timm's with something before or beside them.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_keras import labels
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import ATTENTION, POSITIONS, Facts
from vit_keras.checkpoints.format import (
    Entries,
    Format,
    PrefixRows,
    Written,
    config_choice,
    config_number,
    config_pair,
    config_part,
    numerics_reasons,
)
from vit_keras.checkpoints.maps.pytorch import BLOCK, joined, linear, norm, renamed
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import CONV, FIRST_CONV
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.records import TIMM, Numerics, Preprocessing, Resize, Weights

STEM = "patch_embed.backbone"
UNIT = (STEM + ".stages.{s}.blocks.{u}", "block{s+1}_unit{u+1}")
MAP = f"MAPHead_0/{ATTENTION}"


def convolution(name: str, target: str) -> tuple[Rule, ...]:
    conv, group_norm = ("downsample.conv", "downsample.norm") if target == "_proj" else (f"conv{name}", f"norm{name}")
    kernel = Rule(f"{UNIT[0]}.{conv}.weight", f"{UNIT[1]}/conv{target}/kernel", CONV)
    return kernel, *norm(f"{UNIT[0]}.{group_norm}", f"{UNIT[1]}/gn{target}")


RULES = (
    Rule(f"{STEM}.stem.conv.weight", "conv_root/kernel", FIRST_CONV),
    *norm(f"{STEM}.stem.norm", "gn_root"),
    *convolution("1", "1"),
    *convolution("2", "2"),
    *convolution("3", "3"),
    *convolution("", "_proj"),
    *linear("patch_embed.proj", "embedding", FIRST_CONV),
    Rule("cls_token", "class_token/cls"),
    Rule("dist_token", "distillation_token/dist"),
    Rule("reg_token", "registers/registers"),
    Rule("pos_embed", POSITIONS, TABLE),
    *norm("blocks.{i}.norm1", f"{BLOCK}/LayerNorm_0"),
    *joined("blocks.{i}.attn.qkv", tuple(f"{BLOCK}/{ATTENTION}/{name}" for name in ("query", "key", "value"))),
    *linear("blocks.{i}.attn.proj", f"{BLOCK}/{ATTENTION}/out"),
    Rule("blocks.{i}.ls1.gamma", f"{BLOCK}/LayerScale_0/gamma"),
    *norm("blocks.{i}.norm2", f"{BLOCK}/LayerNorm_1"),
    *linear("blocks.{i}.mlp.fc1", f"{BLOCK}/MlpBlock_0/Dense_0"),
    *linear("blocks.{i}.mlp.fc2", f"{BLOCK}/MlpBlock_0/Dense_1"),
    Rule("blocks.{i}.ls2.gamma", f"{BLOCK}/LayerScale_1/gamma"),
    *norm("norm", "Transformer_encoder_norm"),
    *norm("fc_norm", "pooled_norm"),
    Rule("attn_pool.latent", "MAPHead_0/probe"),
    *linear("attn_pool.q", f"{MAP}/query"),
    *joined("attn_pool.kv", (f"{MAP}/key", f"{MAP}/value")),
    *linear("attn_pool.proj", f"{MAP}/out"),
    *norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
    *linear("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
    *linear("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    *linear("pre_logits.fc", "pre_logits"),
    *linear("head", "head"),
    *linear("head_dist", "head_dist"),
)

_EMBEDDING = "patch_embed.proj.weight"
# Beside the encoder, and no part of it: MAE's decoder, the projection heads of MoCo v3 and DINO, DINOv2's mask token.
_BESIDE = re.compile(r"decoder_.*|mask_token|head\.(mlp|last_layer|\d+)\..*|patch_embed\.norm\..*")
_RENAMED = (
    (re.compile(r"register_tokens"), "reg_token"),  # facebookresearch/dinov2
    (re.compile(r"blocks\.\d+\.(\d+\..*)"), r"blocks.\1"),  # DINOv2 trained with chunks of blocks
    (re.compile(r"(blocks\.\d+\.)gamma_([12])"), r"\1ls\2.gamma"),  # DeiT III
    (re.compile(rf"{re.escape(STEM)}\.(conv|norm)\.(.*)"), rf"{STEM}.stem.\1.\2"),  # a stem without stages
)


def recognises(keys: Collection[str]) -> bool:
    return any(key.endswith(_EMBEDDING) for key in keys)


def canonical(entries: Entries) -> tuple[Entries, tuple[str, ...]]:
    """Without what wraps the encoder (`model.`, `module.base_encoder.`, `teacher.backbone.`) or stands beside it."""
    prefix = _prefix(entries)
    inside = {key: entry for key, entry in entries.items() if key.startswith(prefix)}
    result, left_out = renamed(inside, lambda key: key.removeprefix(prefix), _BESIDE, _RENAMED)
    left_out += tuple(key for key in entries if key not in inside)
    if "attn_pool.latent" in result and {"cls_token", "reg_token"} & result.keys():
        raise CheckpointError("timm's attention pooling leaves class and register tokens out, which is not supported.")
    return result, left_out


def _prefix(entries: Entries) -> str:
    """What stands before the keys of the encoder: of DINO's teacher, MoCo's base encoder, or the only one."""
    found = sorted(key.removesuffix(_EMBEDDING) for key in entries if key.endswith(_EMBEDDING))
    for word in ("teacher.", "base_encoder."):
        meant = [prefix for prefix in found if word in prefix]
        if len(meant) == 1 and len(found) > 1:
            return meant[0]
    if len(found) > 1:
        raise CheckpointError(f"The file holds {len(found)} encoders, under {', '.join(map(repr, found))}.")
    return found[0] if found else ""


def heads(entries: Entries) -> int | None:
    """MoCo v3's ViT-S has 12 heads, as its ViT-B, where every other has 6 (facebookresearch/moco-v3 `vits.py`)."""
    return 12 if any("base_encoder." in key for key in entries) else None


def prefix_rows(keys: Collection[str]) -> PrefixRows:
    """Class and distillation token have rows, unless the model was built with `no_embed_class`: timm's with registers
    are, DINOv2's own are not.
    """
    tokens = ("cls_token" in keys) + ("dist_token" in keys)
    if not tokens:
        return PrefixRows((0,))
    return PrefixRows((0, tokens)) if "reg_token" in keys else PrefixRows((tokens,), unusual=(0,))


NUMERICS = Numerics("exact", 1e-6, group_norm_epsilon=1e-5, std_epsilon=1e-8, std_epsilon_in_variance=True)
GELUS = {"gelu": "exact", "gelu_tanh": "tanh"}
POOLINGS = {"token": "token", "avg": "gap", "map": "map", "": None}
# Units per stage of the stems that timm can build, and a name that builds each.
STEMS = {
    (3, 4, 9): "vit_base_r50_s16_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (): "vit_tiny_r_s16_p8_224",
}


def known(config: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's `config.json` says: `model_args` of the constructor, and `pretrained_cfg`."""
    if "architecture" not in config:
        return {}
    args = config_part(config, "model_args")
    act = config_choice({"act_layer": args.get("act_layer") or "gelu"}, "act_layer", GELUS)
    result: dict[str, Any] = {
        "preprocessing": preprocessing(config_part(config, "pretrained_cfg")),
        "numerics": dataclasses.replace(NUMERICS, gelu=GELUS[act]),
        "num_heads": config_number(args, "num_heads"),
        "labels": _labels(config_part(config, "pretrained_cfg")),
        "image_size": config_pair(args, "img_size") or _input_size(config_part(config, "pretrained_cfg")),
    }
    pooling = args.get("global_pool", config.get("global_pool"))
    if isinstance(pooling, str) and pooling in ("avg", ""):  # what else there is, the keys tell
        result["pooling"] = POOLINGS[pooling]
    return {name: value for name, value in result.items() if value is not None or name == "pooling"}


def _labels(pretrained: Mapping[str, Any]) -> str | None:
    """The label set whose names, in order, are those of `label_names`."""
    names = pretrained.get("label_names")
    return labels.find([str(name) for name in names]) if isinstance(names, list) else None


def _input_size(pretrained: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) of `input_size` (C, H, W)."""
    size = pretrained.get("input_size")
    return config_pair({"input_size": size[1:]}, "input_size") if isinstance(size, list) and len(size) == 3 else None


def preprocessing(pretrained: Mapping[str, Any]) -> Preprocessing:
    """timm's `pretrained_cfg`: `mean`, `std`, `crop_pct`, `crop_mode`, `interpolation`, `input_size` (C, H, W)."""
    squash = pretrained.get("crop_mode") == "squash"
    try:
        size = pretrained.get("input_size")
        return dataclasses.replace(
            TIMM,
            resize="squash" if squash else TIMM.resize,
            crop=1.0 if squash else pretrained.get("crop_pct") or TIMM.crop,
            interpolation=pretrained.get("interpolation") or TIMM.interpolation,
            mean=pretrained.get("mean") or TIMM.mean,
            std=pretrained.get("std") or TIMM.std,
            size=None if size is None else (size[1], size[2]),
        )
    except (TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"config.json: pretrained_cfg cannot be read ({error})") from None


def refuse(facts: Facts, numerics: Numerics) -> list[str]:
    """What timm's constructors cannot build."""
    reasons = numerics_reasons(numerics, dataclasses.replace(NUMERICS, gelu=numerics.gelu), "timm", facts.stem)
    if facts.representation_size:
        reasons.append("timm has no layer for pre_logits")
    if facts.pooling not in POOLINGS.values():
        reasons.append(f"timm has no pooling {facts.pooling!r}")
    if facts.map_head and (facts.class_token or facts.registers):
        reasons.append("timm's attention pooling leaves class and register tokens out")
    if facts.stem and (facts.stem.layers not in STEMS or facts.stem.width_factor != 1 or facts.stem.grey_as_rgb):
        reasons.append(f"timm has stems of {', '.join(map(str, STEMS))} units alone, of width 1")
    if facts.distillation and (facts.prefix_rows != 2 or facts.stem or facts.registers or facts.distillation != True):  # noqa: E712
        reasons.append("timm's distilled models have position rows and heads for both tokens, no stem, no registers")
    return reasons


def write(entries: Entries, facts: Facts, record: Weights) -> Written:
    """timm's layout of a folder: `timm.create_model("local-dir:FOLDER", pretrained=True)` builds and loads it."""
    pixels, (low, high) = record.preprocessing, record.preprocessing.value_range
    pretrained = {
        "input_size": [facts.in_channels, *(pixels.size or facts.native_size or ())],
        "mean": [(mean - low) / (high - low) for mean in pixels.mean],
        "std": [std / (high - low) for std in pixels.std],
        "interpolation": pixels.interpolation if pixels.interpolation in ("bicubic", "bilinear") else "bilinear",
        "crop_pct": pixels.crop,
        "crop_mode": "squash" if pixels.resize == "squash" else "center",
        "num_classes": facts.classes or 0,
        "first_conv": f"{STEM}.stem.conv" if facts.stem else "patch_embed.proj",
        "classifier": ["head", "head_dist"] if facts.distillation else "head",
        "license": "apache-2.0",
    }
    if record.labels:
        pretrained["label_names"] = labels.load(record.labels)
    pooling = next(name for name, ours in POOLINGS.items() if ours == facts.pooling)
    config = {
        "architecture": _architecture(facts),
        "num_classes": facts.classes or 0,
        "num_features": facts.width,
        "global_pool": pooling,
        "model_args": _model_args(facts, pooling, record.gelu),
        "pretrained_cfg": pretrained,
    }
    if facts.stem is not None and not facts.stem.layers:
        entries = {key.replace(f"{STEM}.stem.", f"{STEM}."): entry for key, entry in entries.items()}
    return Written(entries, {"config.json": config})


def _architecture(facts: Facts) -> str:
    """A name that timm knows, whose constructor takes the rest as arguments."""
    if facts.stem is not None:
        return STEMS[facts.stem.layers]
    return "deit_base_distilled_patch16_224" if facts.distillation else "vit_base_patch16_224"


def _model_args(facts: Facts, pooling: str, gelu: str) -> dict[str, Any]:
    ratio = facts.mlp_dim / facts.width
    if int(facts.width * ratio) != facts.mlp_dim:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    args = {
        "img_size": list(facts.native_size or ()),
        "patch_size": list(facts.patch_size),
        "embed_dim": facts.width,
        "depth": facts.depth,
        "num_heads": facts.num_heads,
        "mlp_ratio": ratio,
        "qkv_bias": facts.qkv_bias,
        "act_layer": next(name for name, form in GELUS.items() if form == gelu),
    }
    if facts.stem is not None:
        args["patch_size"] = facts.patch_size[0]
    if facts.distillation:
        return args
    return {
        **args,
        "init_values": 1e-5 if facts.layer_scale else None,
        "class_token": facts.class_token,
        "no_embed_class": bool(facts.class_token or facts.registers) and not facts.prefix_rows,
        "reg_tokens": facts.registers,
        "pos_embed": "learn" if facts.places else "none",
        "global_pool": pooling,
        "fc_norm": facts.norm_after_pooling,
    }


FORMAT = Format(
    name="timm",
    family="timm",
    title="timm's layout",
    rules=RULES,
    numerics=NUMERICS,
    resize=Resize("antialiased_bicubic"),
    preprocessing=TIMM,
    recognises=recognises,
    canonical=canonical,
    prefix_rows=prefix_rows,
    known=known,
    heads=heads,
    refuse=refuse,
    write=write,
)
