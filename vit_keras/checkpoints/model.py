"""What a Keras model of this library is, told by its layers: the facts and numerics that a format must express."""

import dataclasses
from typing import Any

import keras

from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import Facts, facts_of
from vit_keras.layers import (
    AddPositionEmbs,
    AttentionPooling,
    Bottleneck,
    DistilledOutputs,
    Patches,
    StdConv2D,
    TokenPooling,
    TransformerBlock,
)
from vit_keras.records import Numerics, Weights


def facts_of_model(backbone: keras.Model) -> Facts:
    """The facts of a model that directly holds its `embedding` layer.

    Raises:
        CheckpointError: it is none of this library's.
    """
    targets = rules.collect_targets(backbone)
    table = _first(backbone, AddPositionEmbs)
    embedding, block = _first(backbone, Patches), _first(backbone, TransformerBlock)
    if block is None or embedding is None or embedding.width is None:
        raise CheckpointError(f"{backbone.name!r} is no Vision Transformer of this library")
    grid = table.grid if table else tuple(embedding.output.shape[1:3])
    facts = facts_of(
        {path: target.shape for path, target in targets.items()},
        table.prefix_tokens if table and table.weights else 0,
        block.num_heads,
        model_numerics(backbone),
        None if None in grid else grid,
    )
    if facts is None:
        raise CheckpointError(f"{backbone.name!r} is no Vision Transformer of this library")
    if facts.stem is not None:
        grey = any(layer.name == "grey_as_rgb" for layer in backbone.layers)
        facts = dataclasses.replace(facts, stem=dataclasses.replace(facts.stem, grey_as_rgb=grey))
    return dataclasses.replace(facts, pooling=_pooling(backbone))


def _first(backbone: keras.Model, kind: type) -> Any:
    return next((layer for layer in backbone.layers if isinstance(layer, kind)), None)


def _pooling(backbone: keras.Model) -> str | None:
    distilled, pooling = _first(backbone, DistilledOutputs), _first(backbone, TokenPooling)
    if distilled is not None:
        return "both" if distilled.both else "token"
    if _first(backbone, AttentionPooling) is not None:
        return "map"
    return pooling.pooling if pooling is not None else None


def numerics_by_layer(backbone: keras.Model) -> dict[str, list[tuple[str, Any]]]:
    """Field of `Numerics` → (name of a layer, value) of every layer that has it."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for layer in backbone.layers:
        for name, attribute in _FIELDS.get(type(layer), {}).items():
            found.setdefault(name, []).append((layer.name, getattr(layer, attribute)))
    return found


_STD = {"std_epsilon": "epsilon", "std_epsilon_in_variance": "epsilon_in_variance"}
_FIELDS = {
    TransformerBlock: {"gelu": "gelu", "epsilon": "epsilon"},
    AttentionPooling: {"gelu": "gelu", "epsilon": "epsilon"},
    keras.layers.LayerNormalization: {"epsilon": "epsilon"},
    keras.layers.GroupNormalization: {"group_norm_epsilon": "epsilon"},
    StdConv2D: _STD,
    Bottleneck: {"group_norm_epsilon": "norm_epsilon", **{name: name for name in _STD}},
}


def model_numerics(backbone: keras.Model) -> Numerics:
    """The numerics of a model, as its first layers have them."""
    return Numerics(**{name: values[0][1] for name, values in numerics_by_layer(backbone).items()})


def record_of(backbone: keras.Model) -> Weights:
    """The record of the weights that a model was given, its numerics as the layers have them; of a new model, empty."""
    embedding, numerics = _first(backbone, Patches), model_numerics(backbone)
    record = Weights.from_dict(embedding.record) if embedding.record else Weights("", "", "tanh", 1e-6)
    return dataclasses.replace(record, gelu=numerics.gelu, epsilon=numerics.epsilon)
