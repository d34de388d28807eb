"""Hugging Face transformers: ViT, DeiT, DINOv2 without and with registers.

Keys are those that `save_pretrained` writes, in transformers 4 and 5 alike; the names that modules have inside
transformers 5 are brought to them.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_keras.checkpoints.arrays import Entry
from vit_keras.checkpoints.facts import ATTENTION, POSITIONS, Facts
from vit_keras.checkpoints.format import Entries, Format, PrefixRows, Written
from vit_keras.checkpoints.maps.huggingface_config import (
    DINOV2_EPSILON,
    VIT_EPSILON,
    common_config,
    folder_files,
    known,
)
from vit_keras.checkpoints.maps.pytorch import BLOCK, linear, norm, renamed
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_CONV
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.records import HUGGING_FACE, IMAGENET_MEAN, Numerics, Resize, Weights

LAYER = "encoder.layer.{i}"

COMMON = (
    *linear("embeddings.patch_embeddings.projection", "embedding", FIRST_CONV),
    Rule("embeddings.cls_token", "class_token/cls"),
    Rule("embeddings.position_embeddings", POSITIONS, TABLE),
    *linear(f"{LAYER}.attention.attention.query", f"{BLOCK}/{ATTENTION}/query"),
    *linear(f"{LAYER}.attention.attention.key", f"{BLOCK}/{ATTENTION}/key"),
    *linear(f"{LAYER}.attention.attention.value", f"{BLOCK}/{ATTENTION}/value"),
    *linear(f"{LAYER}.attention.output.dense", f"{BLOCK}/{ATTENTION}/out"),
    *norm("layernorm", "Transformer_encoder_norm"),
)
VIT_RULES = (
    *COMMON,
    Rule("embeddings.distillation_token", "distillation_token/dist"),
    *norm(f"{LAYER}.layernorm_before", f"{BLOCK}/LayerNorm_0"),
    *norm(f"{LAYER}.layernorm_after", f"{BLOCK}/LayerNorm_1"),
    *linear(f"{LAYER}.intermediate.dense", f"{BLOCK}/MlpBlock_0/Dense_0"),
    *linear(f"{LAYER}.output.dense", f"{BLOCK}/MlpBlock_0/Dense_1"),
    *linear("pooler.dense", "pre_logits"),
    *linear("classifier", "head"),
    *linear("cls_classifier", "head"),
    *linear("distillation_classifier", "head_dist"),
)
DINOV2_RULES = (
    *COMMON,
    Rule("embeddings.register_tokens", "registers/registers"),
    *norm(f"{LAYER}.norm1", f"{BLOCK}/LayerNorm_0"),
    Rule(f"{LAYER}.layer_scale1.lambda1", f"{BLOCK}/LayerScale_0/gamma"),
    *norm(f"{LAYER}.norm2", f"{BLOCK}/LayerNorm_1"),
    *linear(f"{LAYER}.mlp.fc1", f"{BLOCK}/MlpBlock_0/Dense_0"),
    *linear(f"{LAYER}.mlp.fc2", f"{BLOCK}/MlpBlock_0/Dense_1"),
    Rule(f"{LAYER}.layer_scale2.lambda1", f"{BLOCK}/LayerScale_1/gamma"),
    *linear("classifier", "head"),
)

_MODEL = re.compile(r"^(?:vit|deit|dinov2|dinov2_with_registers)\.")
_BESIDE = re.compile(r"embeddings\.mask_token|decoder\..*")  # masked-image modelling, no part of the encoder
# Names of the modules in transformers 5 → those of the files.
_RENAMED = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"layers\.(\d+)\.mlp\.fc1\.(.*)", r"encoder.layer.\1.intermediate.dense.\2"),
        (r"layers\.(\d+)\.mlp\.fc2\.(.*)", r"encoder.layer.\1.output.dense.\2"),
        (r"layers\.(.*)", r"encoder.layer.\1"),
        (r"(.*\.attention)\.q_proj\.(.*)", r"\1.attention.query.\2"),
        (r"(.*\.attention)\.k_proj\.(.*)", r"\1.attention.key.\2"),
        (r"(.*\.attention)\.v_proj\.(.*)", r"\1.attention.value.\2"),
        (r"(.*\.attention)\.o_proj\.(.*)", r"\1.output.dense.\2"),
    )
)


def canonical(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    """Without the name of the model in front, and with the names that files have."""
    entries = {key: entry for key, entry in entries.items() if 0 not in entry.shape}  # num_register_tokens=0
    return renamed(entries, lambda key: _MODEL.sub("", key, count=1), _BESIDE, _RENAMED)


def is_vit(keys: Collection[str]) -> bool:
    return any("patch_embeddings.projection." in key for key in keys) and not is_dinov2(keys)


def is_dinov2(keys: Collection[str]) -> bool:
    return any("patch_embeddings.projection." in key for key in keys) and any(
        ".layer_scale1." in key or ".norm1." in key for key in keys
    )


def has_registers(keys: Collection[str]) -> bool:
    return is_dinov2(keys) and any("embeddings.register_tokens" in key for key in keys)


def prefix_rows(keys: Collection[str]) -> PrefixRows:
    return PrefixRows((1 + ("embeddings.distillation_token" in keys),))


def _refuse_always(facts: Facts) -> list[str]:
    reasons = []
    if facts.stem is not None:
        reasons.append("transformers' ViT has no ResNet stem")
    if not facts.class_token:
        reasons.append("transformers' ViT has a class token")
    if not facts.places:
        reasons.append("transformers' ViT has learned positions")
    if facts.norm_after_pooling:
        reasons.append("transformers' ViT has its last norm before the pooling")
    return reasons


def refuse_vit(facts: Facts, numerics: Numerics) -> list[str]:
    reasons = _refuse_always(facts)
    if facts.pooling not in ("token", "both", None) or (facts.pooling is None and facts.classes):
        reasons.append(f"transformers' ViT reads the class token, this model has pooling {facts.pooling!r}")
    if facts.registers or facts.layer_scale:
        reasons.append("transformers' ViT has no registers and no layer-scale")
    if facts.representation_size and (facts.classes or facts.representation_size != facts.width):
        reasons.append("transformers' ViT has its pooler, our pre_logits, without a head alone, and as wide as a token")
    return reasons


def refuse_dinov2(facts: Facts, numerics: Numerics) -> list[str]:
    reasons = _refuse_always(facts)
    if facts.classes and facts.pooling != "token_gap":
        reasons.append(f"transformers' DINOv2 reads class token and mean, this model has pooling {facts.pooling!r}")
    if not facts.layer_scale:
        reasons.append("transformers' DINOv2 has layer-scale")
    if facts.representation_size or facts.distillation:
        reasons.append("transformers' DINOv2 has no pre_logits and no distillation token")
    if facts.mlp_dim % facts.width:
        reasons.append("transformers' DINOv2 has an MLP that is a whole number of times as wide as a token")
    return reasons


def write_vit(entries: Entries, facts: Facts, record: Weights) -> Written:
    """A folder for `from_pretrained` of `ViTModel`, `ViTForImageClassification` or their DeiT twins."""
    model = "deit" if facts.distillation else "vit"
    two_heads = facts.distillation is True and bool(facts.classes)
    kind = "Model" if not facts.classes else "ForImageClassification" + "WithTeacher" * two_heads
    config = common_config(facts, record, model, {"vit": "ViT", "deit": "DeiT"}[model] + kind)
    config |= {"intermediate_size": facts.mlp_dim, "torch_dtype": _dtype(entries)}
    if two_heads:
        entries = {f"cls_{key}" if key.startswith("classifier.") else key: entry for key, entry in entries.items()}
    missing_rows = 1 + bool(facts.distillation) - facts.prefix_rows
    entries = _named(entries, model if facts.classes else "", missing_rows)
    return Written(entries, folder_files(config, record, facts))


def write_dinov2(entries: Entries, facts: Facts, record: Weights) -> Written:
    """A folder for `from_pretrained` of `Dinov2Model`, `Dinov2ForImageClassification` or those with registers."""
    model = "dinov2_with_registers" if facts.registers else "dinov2"
    kind = "ForImageClassification" if facts.classes else "Model"
    config = common_config(facts, record, model, ("Dinov2WithRegisters" if facts.registers else "Dinov2") + kind)
    config |= {"mlp_ratio": facts.mlp_dim // facts.width, "layerscale_value": 1.0, "use_swiglu_ffn": False}
    config["torch_dtype"] = _dtype(entries)
    if facts.registers:
        config["num_register_tokens"] = facts.registers
    # Used in pre-training alone; a file without it makes from_pretrained warn of a new one.
    entries = {**entries, "embeddings.mask_token": _zeros(1, facts.width)}
    entries = _named(entries, model if facts.classes else "", 1 - facts.prefix_rows)
    return Written(entries, folder_files(config, record, facts))


def _named(entries: Entries, model: str, missing_rows: int) -> Entries:
    """Keys behind the model's name, and a position table with a row for each prefix token, zero where ours has none."""

    def with_rows(table: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((1, missing_rows, table.shape[2]), table.dtype), table], axis=1)

    table = entries["embeddings.position_embeddings"]
    entries = {**entries, "embeddings.position_embeddings": table.then(with_rows) if missing_rows else table}
    inside = ("embeddings.", "encoder.", "layernorm.")
    return {f"{model}.{key}" if model and key.startswith(inside) else key: entry for key, entry in entries.items()}


def _dtype(entries: Entries) -> str:
    return entries["embeddings.cls_token"].dtype.name


def _zeros(*shape: int) -> Entry:
    return Entry(shape, np.dtype("float32"), lambda: np.zeros(shape, "float32"))


VIT = Format(
    name="huggingface",
    family="huggingface",
    title="the layout of Hugging Face's ViT and DeiT",
    rules=VIT_RULES,
    numerics=Numerics("exact", VIT_EPSILON),
    resize=Resize("bicubic"),
    preprocessing=HUGGING_FACE,
    recognises=is_vit,
    canonical=canonical,
    prefix_rows=prefix_rows,
    known=known,
    refuse=refuse_vit,
    write=write_vit,
)
DINOV2 = Format(
    name="huggingface_dinov2",
    family="huggingface",
    title="the layout of Hugging Face's DINOv2",
    rules=DINOV2_RULES,
    numerics=Numerics("exact", DINOV2_EPSILON),
    resize=Resize("bicubic"),
    preprocessing=IMAGENET_MEAN,
    recognises=is_dinov2,
    canonical=canonical,
    prefix_rows=prefix_rows,
    known=known,
    refuse=refuse_dinov2,
    write=write_dinov2,
)
DINOV2_REGISTERS = dataclasses.replace(
    DINOV2, name="huggingface_dinov2_registers", resize=Resize("antialiased_bicubic"), recognises=has_registers
)
