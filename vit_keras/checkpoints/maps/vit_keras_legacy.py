"""Weights saved by the old vit-keras package, 0.1 (Keras 2, `.h5`) and 0.2 (Keras 3, `.weights.h5`, `.h5`, `.keras`).

It read the original files, and so has their names; but it ran the exact GELU.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import ATTENTION, POSITIONS
from vit_keras.checkpoints.format import Entries, Format, config_number
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.records import ALIGN_CORNERS, ORIGINAL, Numerics

BLOCK = "Transformer_encoderblock_{i}"


def _norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}/gamma", f"{target}/gamma"), Rule(f"{source}/beta", f"{target}/beta")


def _dense(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}/kernel", f"{target}/kernel"), Rule(f"{source}/bias", f"{target}/bias")


RULES = (
    Rule("embedding/kernel", "embedding/kernel", FIRST_KERNEL),
    Rule("embedding/bias", "embedding/bias"),
    Rule("class_token/cls", "class_token/cls"),
    Rule("Transformer_posembed_input/pos_embedding", POSITIONS, TABLE),
    *_norm(f"{BLOCK}/LayerNorm_0", f"{BLOCK}/LayerNorm_0"),
    *_norm(f"{BLOCK}/LayerNorm_2", f"{BLOCK}/LayerNorm_1"),
    *_dense(f"{BLOCK}/MultiHeadDotProductAttention_1/query", f"{BLOCK}/{ATTENTION}/query"),
    *_dense(f"{BLOCK}/MultiHeadDotProductAttention_1/key", f"{BLOCK}/{ATTENTION}/key"),
    *_dense(f"{BLOCK}/MultiHeadDotProductAttention_1/value", f"{BLOCK}/{ATTENTION}/value"),
    *_dense(f"{BLOCK}/MultiHeadDotProductAttention_1/out", f"{BLOCK}/{ATTENTION}/out"),
    *_dense(f"{BLOCK}/MlpBlock_3/Dense_0", f"{BLOCK}/MlpBlock_0/Dense_0"),
    *_dense(f"{BLOCK}/MlpBlock_3/Dense_1", f"{BLOCK}/MlpBlock_0/Dense_1"),
    *_norm("Transformer_encoder_norm", "Transformer_encoder_norm"),
    *_dense("pre_logits", "pre_logits"),
    *_dense("head", "head"),
)

_PLACES = {"0": ("kernel", "gamma"), "1": ("bias", "beta")}
# Attributes under which Keras 3 files hold a layer's parts → names that the layers have.
_PARTS = {
    "att/query_dense": "MultiHeadDotProductAttention_1/query",
    "att/key_dense": "MultiHeadDotProductAttention_1/key",
    "att/value_dense": "MultiHeadDotProductAttention_1/value",
    "att/combine_heads": "MultiHeadDotProductAttention_1/out",
    "mlpblock/layers/dense": "MlpBlock_3/Dense_0",
    "mlpblock/layers/dense_1": "MlpBlock_3/Dense_1",
    "layernorm1": "LayerNorm_0",
    "layernorm2": "LayerNorm_2",
}
_LAYERS = {
    "conv2d/vars/0": "embedding/kernel",
    "conv2d/vars/1": "embedding/bias",
    "class_token/vars/0": "class_token/cls",
    "add_position_embs/vars/0": "Transformer_posembed_input/pos_embedding",
    "layer_normalization/vars/0": "Transformer_encoder_norm/gamma",
    "layer_normalization/vars/1": "Transformer_encoder_norm/beta",
}
_KERAS_3_BLOCK = re.compile(r"transformer_block(?:_(\d+))?/(.+)/vars/([01])")
_KERAS_3_DENSE = re.compile(r"dense(_1)?/vars/([01])")
# The name of a layer, those of its variables, in which it stands again, and TensorFlow's `:0`.
_KERAS_2 = re.compile(r"(?:model_weights/)?(.+?)/(\1/.+?)(?::0)?")
_MLP = re.compile(
    r"(Transformer_encoderblock_\d+/)(?:MlpBlock_3/)?(?:Transformer_encoderblock_\d+[_/])?(Dense_[01]/.+)"
)


def recognises(keys: Collection[str]) -> bool:
    return any("transformer_block/att/query_dense/" in key for key in keys) or any(
        "Transformer_encoderblock_0/" in key or "Transformer/encoderblock_0/Transformer/encoderblock_0/" in key
        for key in keys
    )


def canonical(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    """To the names that the layers had, whichever Keras wrote the file."""
    left_out = tuple(key for key in entries if key.startswith(("optimizer", "_optimizer")))
    kept = {key: entry for key, entry in entries.items() if key not in left_out}
    # Keras 3 counts the Dense layers on top: with a second, the first is `pre_logits`.
    first = "pre_logits" if "layers/dense_1/vars/0" in kept else "head"
    result: Entries = {}
    for key, entry in kept.items():
        name = _keras_3_name(key.removeprefix("layers/"), first) if key.startswith("layers/") else _keras_2_name(key)
        if name in result:
            raise CheckpointError(f"The file holds {name!r} twice, under two names.")
        result[name] = entry
    return result, left_out


def _keras_3_name(key: str, first_dense: str) -> str:
    if key in _LAYERS:
        return _LAYERS[key]
    if found := _KERAS_3_DENSE.fullmatch(key):
        return f"{'head' if found[1] else first_dense}/{_PLACES[found[2]][0]}"
    found = _KERAS_3_BLOCK.fullmatch(key)
    if found is None or found[2] not in _PARTS:
        return key
    kind = _PLACES[found[3]]["layernorm" in found[2]]
    return f"Transformer_encoderblock_{found[1] or 0}/{_PARTS[found[2]]}/{kind}"


def _keras_2_name(key: str) -> str:
    """Without the name of the layer that stands before those of its variables, and without TensorFlow's `:0`."""
    found = _KERAS_2.fullmatch(key)
    # Keras 2 let names of layers hold slashes: `Transformer/encoderblock_0`.
    name = re.sub("^Transformer/", "Transformer_", found[2].replace("/Transformer/", "/")) if found else key
    return _MLP.sub(r"\1MlpBlock_3/\2", name)


def known(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The number of heads, from the configuration of a whole model."""
    heads = config_number(config, "num_heads")
    return {"num_heads": heads} if heads else {}


FORMAT = Format(
    name="vit_keras_legacy",
    family="vit_keras_legacy",
    title="the layout of the old vit-keras package",
    rules=RULES,
    numerics=Numerics("exact"),
    resize=ALIGN_CORNERS,
    preprocessing=ORIGINAL,
    recognises=recognises,
    canonical=canonical,
    known=known,
)
