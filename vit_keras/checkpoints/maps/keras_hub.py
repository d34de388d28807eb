"""keras-hub's ViT: the preset folders of `ViTBackbone` and `ViTImageClassifier`.

The backbone lies in `model.weights.h5`, the layers on top of it in `task.weights.h5`: here their keys begin with
`task/`.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_keras.checkpoints.facts import ATTENTION, POSITIONS, Facts
from vit_keras.checkpoints.files import TASK
from vit_keras.checkpoints.format import (
    Entries,
    Format,
    PrefixRows,
    Written,
    numerics_reasons,
)
from vit_keras.checkpoints.kinds import write_hdf5
from vit_keras.checkpoints.maps.keras_hub_config import ACTIVATIONS, EMBEDDING, known, preset_files
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL, FLAT_POSITIONS, SAME, SPLIT_FIRST, SPLIT_LAST, Transform
from vit_keras.records import ALIGN_CORNERS, ORIGINAL, Numerics, Weights

ENCODER = "layers/vi_t_encoder"
POSITIONS_KEY = f"{EMBEDDING}/position_embedding/vars/0"
SOURCE, BLOCK = f"{ENCODER}/encoder_layers/vi_t_encoder_block_{{i}}", "Transformer_encoderblock_{i}"


def _pair(source: str, target: str, first: Transform = SAME, second: Transform = SAME) -> tuple[Rule, Rule]:
    is_norm = target.endswith(("LayerNorm_0", "LayerNorm_1", "encoder_norm"))
    names = ("gamma", "beta") if is_norm else ("kernel", "bias")
    return (
        Rule(f"{source}/vars/0", f"{target}/{names[0]}", first),
        Rule(f"{source}/vars/1", f"{target}/{names[1]}", second),
    )


RULES = (
    *_pair(f"{EMBEDDING}/patch_embedding", "embedding", FIRST_KERNEL),
    Rule(f"{EMBEDDING}/vars/0", "class_token/cls"),
    Rule(POSITIONS_KEY, POSITIONS, FLAT_POSITIONS),
    *_pair(f"{SOURCE}/layer_norm_1", f"{BLOCK}/LayerNorm_0"),
    *_pair(f"{SOURCE}/layer_norm_2", f"{BLOCK}/LayerNorm_1"),
    *_pair(f"{SOURCE}/mha/query_dense", f"{BLOCK}/{ATTENTION}/query", SPLIT_LAST, SPLIT_LAST),
    *_pair(f"{SOURCE}/mha/key_dense", f"{BLOCK}/{ATTENTION}/key", SPLIT_LAST, SPLIT_LAST),
    *_pair(f"{SOURCE}/mha/value_dense", f"{BLOCK}/{ATTENTION}/value", SPLIT_LAST, SPLIT_LAST),
    *_pair(f"{SOURCE}/mha/output_dense", f"{BLOCK}/{ATTENTION}/out", SPLIT_FIRST),
    *_pair(f"{SOURCE}/mlp/dense_1", f"{BLOCK}/MlpBlock_0/Dense_0"),
    *_pair(f"{SOURCE}/mlp/dense_2", f"{BLOCK}/MlpBlock_0/Dense_1"),
    *_pair(f"{ENCODER}/layer_norm", "Transformer_encoder_norm"),
    *_pair("task/layers/pre_logits", "pre_logits"),
    *_pair("task/layers/predictions", "head"),
)

_FIRST_BLOCK = re.compile(r"(.*/vi_t_encoder_block)(/.*)")
_DENSE = re.compile(r"task/layers/dense(_1)?(/.*)")


def recognises(keys: Collection[str]) -> bool:
    return any(key.startswith(f"{ENCODER}/") for key in keys)


def canonical(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    """Keras counts layers of one class from none: `block`, `block_1` …; on top, with two Dense, the first is inner."""
    first = "pre_logits" if any(key.startswith("task/layers/dense_1/") for key in entries) else "predictions"
    result, left_out = {}, []
    for key, entry in entries.items():
        if "optimizer/" in key:
            left_out.append(key)
            continue
        name = _FIRST_BLOCK.sub(r"\1_0\2", key)
        if found := _DENSE.fullmatch(name):
            name = f"task/layers/{'predictions' if found[1] else first}{found[2]}"
        result[name] = entry
    return result, tuple(left_out)


def prefix_rows(keys: Collection[str]) -> PrefixRows:
    return PrefixRows((int(f"{EMBEDDING}/vars/0" in keys),))


def heads(entries: Entries) -> int | None:
    shape = next((entry.shape for key, entry in entries.items() if key.endswith("/mha/query_dense/vars/0")), ())
    return shape[1] if len(shape) == 3 else None


def refuse(facts: Facts, numerics: Numerics) -> list[str]:
    reasons = numerics_reasons(numerics, Numerics("exact", numerics.epsilon), "keras-hub's ViT")
    wrong = {
        "a ResNet stem": facts.stem is not None,
        "registers": facts.registers,
        "a distillation token": facts.distillation,
        "layer-scale": facts.layer_scale,
        "a norm after the pooling": facts.norm_after_pooling,
        f"pooling {facts.pooling!r}": facts.classes and facts.pooling != ("token" if facts.class_token else "gap"),
        "an attention without biases of query, key and value but one of the output": not facts.qkv_bias,
        "pre_logits without a head": facts.representation_size and not facts.classes,
        "no learned positions": not facts.places,
        f"a head of activation {facts.activation!r}": facts.activation not in ACTIVATIONS,
    }
    return [*reasons, *(f"keras-hub's ViT cannot have {what}" for what, is_so in wrong.items() if is_so)]


def write(entries: Entries, facts: Facts, record: Weights) -> Written:
    """A preset folder: `keras_hub.models.ViTImageClassifier.from_preset(folder)`, or `Backbone` without a head."""
    if facts.class_token and not facts.prefix_rows:  # its table has a row for the class token: of zeros
        table = entries[POSITIONS_KEY].then(lambda rows: np.concatenate([np.zeros((1, facts.width), rows.dtype), rows]))
        entries = {**entries, POSITIONS_KEY: table}
    parameters = sum(math.prod(entry.shape) for key, entry in entries.items() if not key.startswith(TASK))
    files = preset_files(facts, record, parameters, facts.activation)
    dense = {"pre_logits": "dense", "predictions": "dense_1" if facts.representation_size else "dense"}
    names = {f"task/layers/{name}/": f"task/layers/{counted}/" for name, counted in dense.items()}
    names["/vi_t_encoder_block_0/"] = "/vi_t_encoder_block/"
    return Written({_replaced(key, names): entry for key, entry in entries.items()}, files)


def save_presets(folder: str, entries: Entries) -> None:
    """The backbone into `model.weights.h5`, what stands on top of it into `task.weights.h5`."""
    task = {key.removeprefix(TASK): entry.read() for key, entry in entries.items() if key.startswith(TASK)}
    backbone = {key: entry for key, entry in entries.items() if not key.startswith(TASK)}
    write_hdf5(os.path.join(folder, "model.weights.h5"), backbone)
    if task:
        # The optimizer that ViTImageClassifier is compiled with: no steps so far, and its learning rate.
        adam = {"optimizer/vars/0": np.int64(0), "optimizer/vars/1": np.float32(5e-5)}
        write_hdf5(os.path.join(folder, "task.weights.h5"), {**task, **adam})


def _replaced(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if old in key:
            return key.replace(old, new)
    return key


FORMAT = Format(
    name="keras_hub",
    family="keras_hub",
    title="the layout of keras-hub's ViT",
    rules=RULES,
    numerics=Numerics("exact"),
    resize=ALIGN_CORNERS,
    preprocessing=ORIGINAL,
    recognises=recognises,
    canonical=canonical,
    prefix_rows=prefix_rows,
    known=known,
    heads=heads,
    refuse=refuse,
    write=write,
    save_arrays=save_presets,
)
