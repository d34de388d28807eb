"""timm's Vision Transformers and hybrids, and the PyTorch state dicts whose keys they share.

Covers `VisionTransformer`, `VisionTransformerDistilled` and hybrids of timm; MAE, MoCo v3, DINO and DINOv2 of
facebookresearch, whose keys are timm's with something before or beside them.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_keras.checkpoints.arrays import CheckpointError, Entry
from vit_keras.checkpoints.facts import ATTENTION, POSITIONS, Facts
from vit_keras.checkpoints.format import (
    Entries,
    Format,
    PrefixRows,
    Written,
    config_part,
    numerics_reasons,
)
from vit_keras.checkpoints.maps.pytorch import BLOCK, joined, linear, norm, renamed
from vit_keras.checkpoints.maps.timm_config import GELUS, NUMERICS, POOLINGS, known, pretrained_cfg
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import CONV, FIRST_CONV
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.layers import square_grid
from vit_keras.records import TIMM, Numerics, Resize, Weights

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


def canonical(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    """Without what wraps the encoder (`model.`, `module.base_encoder.`, `teacher.backbone.`) or stands beside it."""
    prefix = _prefix(entries)
    inside = {key: entry for key, entry in entries.items() if key.startswith(prefix)}
    result, left_out = renamed(inside, lambda key: key.removeprefix(prefix), _BESIDE, _RENAMED)
    left_out += tuple(key for key in entries if key not in inside)
    if "attn_pool.latent" in result and {"cls_token", "reg_token"} & result.keys():
        raise CheckpointError("timm's attention pooling leaves class and register tokens out, which is not supported.")
    return _without_register_rows(result, config), left_out


def _without_register_rows(entries: Entries, config: Mapping[str, Any]) -> Entries:
    """The rows that timm's table has for registers, unless built with `no_embed_class`, are added to the registers."""
    if not {"reg_token", "pos_embed"} <= entries.keys():
        return entries
    table, token = entries["pos_embed"], entries["reg_token"]
    start, end = _prefix_tokens(entries), _prefix_tokens(entries) + token.shape[1]
    args = config_part(config, "model_args")
    squares = {before for before in (0, start, end) if square_grid(table.shape[1] - before)}
    if args.get("no_embed_class") if "no_embed_class" in args else squares != {end}:
        return entries
    return {
        **entries,
        "pos_embed": table.then(lambda rows: np.concatenate([rows[:, :start], rows[:, end:]], axis=1)),
        "reg_token": Entry(token.shape, token.dtype, lambda: token.read() + table.read()[:, start:end]),
    }


def _prefix_tokens(keys: Collection[str]) -> int:
    return ("cls_token" in keys) + ("dist_token" in keys)


def _prefix(entries: Entries) -> str:
    """What stands before the keys of the encoder: of DINO's teacher, MoCo's base encoder, or the only one."""
    found = sorted(key.removesuffix(_EMBEDDING) for key in entries if key.endswith(_EMBEDDING))
    for word in ("teacher.", "base_encoder."):
        meant = [prefix for prefix in found if word in prefix]
        if len(meant) == 1 and len(found) > 1:
            return meant[0]
    if len(found) > 1:
        raise CheckpointError(
            f"The file holds {len(found)} encoders, under {', '.join(map(repr, found))}: pass the arrays of one as a "
            "mapping, or save them to a file of their own."
        )
    return found[0] if found else ""


def heads(entries: Entries) -> int | None:
    """MoCo v3's ViT-S has 12 heads, as its ViT-B, where every other has 6 (facebookresearch/moco-v3 `vits.py`)."""
    widths = {entry.shape[0] for key, entry in entries.items() if "base_encoder." in key and key.endswith(_EMBEDDING)}
    return 12 if widths & {384, 768} else None


def prefix_rows(keys: Collection[str]) -> PrefixRows:
    """Class and distillation token have rows, unless the model was built with `no_embed_class`: timm's with registers
    are, DINOv2's own are not.
    """
    tokens = _prefix_tokens(keys)
    if not tokens:
        return PrefixRows((0,))
    return PrefixRows((0, tokens)) if "reg_token" in keys else PrefixRows((tokens,), unusual=(0,))


# Units per stage of the stems that timm can build, and a name that builds each.
STEMS = {
    (3, 4, 9): "vit_base_r50_s16_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (): "vit_tiny_r_s16_p8_224",
}


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
    pooling = next(name for name, ours in POOLINGS.items() if ours == facts.pooling)
    config = {
        "architecture": _architecture(facts),
        "num_classes": facts.classes or 0,
        "num_features": facts.width,
        "global_pool": pooling,
        "model_args": _model_args(facts, pooling, record.gelu),
        "pretrained_cfg": pretrained_cfg(facts, record, f"{STEM}.stem.conv" if facts.stem else "patch_embed.proj"),
    }
    if facts.stem is not None and not facts.stem.layers:
        entries = {key.replace(f"{STEM}.stem.", f"{STEM}."): entry for key, entry in entries.items()}
    if facts.registers and facts.prefix_rows:  # timm's table has rows for them too
        places = [facts.prefix_rows] * facts.registers
        table = entries["pos_embed"].then(lambda rows: np.insert(rows, places, 0, axis=1))
        entries = {**entries, "pos_embed": table}
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
        "init_values": 1e-5 if facts.layer_scale else None,
    }
    if facts.stem is not None:
        args["patch_size"] = facts.patch_size[0]
    if facts.distillation:
        return args
    return {
        **args,
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
