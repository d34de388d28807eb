"""What a Keras model of this library is, told by its layers: the facts and numerics that a format must express."""

import dataclasses
import os
import zipfile
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
    GridTables,
    Patches,
    StdConv2D,
    TokenPooling,
    TransformerBlock,
    walk,
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
    return dataclasses.replace(facts, pooling=_pooling(backbone), activation=_activation(backbone))


def _activation(backbone: keras.Model) -> str:
    """Name of the head's activation; `"linear"` without a head."""
    head = next((layer for layer in backbone.layers if layer.name == "head"), None)
    return "linear" if head is None else getattr(head.activation, "__name__", type(head.activation).__name__)


def load_keras(path: str | os.PathLike) -> keras.Model:
    """Load a `.keras` file in safe mode, not compiled.

    Raises:
        CheckpointError: there is no such file, or it is no model that can be loaded.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise CheckpointError(f"{name}: there is no such file. Expected the path of a .keras model.")
    if not zipfile.is_zipfile(name):
        raise CheckpointError(f"{name}: not a .keras file, or a truncated one; copy or download it again.")
    # A damaged archive can fail anywhere in Keras, HDF5 or the layers.
    try:
        return keras.saving.load_model(name, compile=False)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{name}: not a Keras model that can be loaded ({reason})") from error


# Keras' own layers in the models of `vit_keras.vit` and `vit_keras.hybrid`, by name.
_BUILT_IN = {"head", "head_dist", "pre_logits", "Transformer_dropout", "Transformer_encoder_norm", "pooled_norm"}
_BUILT_IN |= {"tokens", "gn_root", "relu_root", "pool_root", "grey_as_rgb"}


def refuse_layers_outside(model: keras.Model, backbone: keras.Model) -> None:
    """
    Raises:
        CheckpointError: `model` computes more than its Vision Transformer, which a conversion would lose: layers or
            operations around or behind it, several outputs, a `call` of its own.
    """
    if model is not backbone and not hasattr(model, "operations") and not isinstance(model, keras.Sequential):
        outside = [f"{type(model).__name__}.call"]
    else:
        operations = getattr(model, "operations", model.layers)
        outside = [operation.name for operation in operations if operation is not backbone and not _is_ours(operation)]
    if len(backbone.outputs) != 1 or len(getattr(model, "outputs", "1")) != 1:
        outside.append("several outputs")
    if outside:
        raise CheckpointError(
            f"{model.name!r} has more than its Vision Transformer {backbone.name!r}, which would be lost: "
            f"{', '.join(outside[:4])}. Convert that model alone, its head built into it (include_top=True)."
        )


def _is_ours(operation: Any) -> bool:
    is_input = isinstance(operation, keras.layers.InputLayer)
    return is_input or operation.name in _BUILT_IN or type(operation).__module__.startswith("vit_keras.")


def architecture_of(backbone: keras.Model) -> dict[str, Any]:
    """Fields of `vit_keras.spec.ViTSpec` that only a model says, beside its facts."""
    embedding, table, block = (_first(backbone, kind) for kind in (Patches, AddPositionEmbs, TransformerBlock))
    last = [layer for layer in backbone.layers if isinstance(layer, TransformerBlock)][-1]
    names = {layer.name: layer for layer in backbone.layers}
    size = tuple(backbone.input_shape[1:3])
    fields = {
        "position": block.position or (table.kind if table else "none"),
        "image_size": None if None in size else size,
        "remainder": embedding.remainder,
        "dropout": block.dropout,
        "attention_dropout": block.attention_dropout,
        "drop_path": last.drop_path,
        "dtype": block.dtype_policy.name,
        "name": backbone.name,
        "in_channels": backbone.input_shape[-1],
    }
    tables = [layer for layer in walk(backbone) if isinstance(layer, GridTables)]
    if fields["image_size"] is None and tables:
        fields["native_size"] = facts_of_model(backbone).image_size_of(tables[0].grid)
    if block.layer_scale is not None:
        fields["layer_scale"] = block.layer_scale
    if "head" in names:
        fields["activation"] = names["head"].activation
    return fields


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
