"""Weights of Keras models out into foreign formats: everything is checked first, and nothing is half-written."""

import contextlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from vit_keras.checkpoints import eras, rules
from vit_keras.checkpoints.arrays import CheckpointError, write_npz
from vit_keras.checkpoints.facts import Facts
from vit_keras.checkpoints.format import Format, Written
from vit_keras.checkpoints.maps import FORMATS, jax
from vit_keras.checkpoints.model import facts_of_model, model_numerics, record_of, refuse_layers_outside
from vit_keras.checks import as_choice
from vit_keras.layers import AddPositionEmbs


def export_arrays(model: keras.Model, naming: str = "released") -> dict[str, np.ndarray]:
    """The weights of a model as arrays in the original JAX layout.

    Args:
        model: a model with one Vision Transformer of this library in it.
        naming: `"released"` (default), the names and shapes of the published files, or `"current"`, those the
            original code writes today. A table without a row for a class token that is there, or beside attention
            pooling, takes big_vision's place, `pos_embedding`.

    Returns:
        key → array, of the variables' dtype.

    Raises:
        CheckpointError: the model has parts that the layout has no names for.
    """
    as_choice(naming, "naming", ("released", "current"))
    backbone = rules.find_backbone(model)
    entries = jax.placed(rules.export(jax.RULES, rules.collect_targets(backbone)), facts_of_model(backbone))
    entries = eras.to_released(entries) if naming == "released" else entries
    return {key: entry.read() for key, entry in entries.items()}


def save_npz(model: keras.Model, path: str | os.PathLike, naming: str = "released") -> None:
    """Write a model's weights as an `.npz` checkpoint in the original JAX layout; see `export_arrays`."""
    write_npz(path, export_arrays(model, naming))


def prepare(model: keras.Model, family: str, accept_numerics: bool = False) -> tuple[Format, Written, dict[str, str]]:
    """A model's weights in a foreign format, not yet read; and path of each variable → its key there.

    Args:
        model: a model with one Vision Transformer of this library in it.
        family: `"original"`, `"timm"`, `"huggingface"` or `"keras_hub"`.
        accept_numerics: whether a format is taken whose code computes with other numerics than the model.

    Raises:
        CheckpointError: the format cannot express the model; every reason is listed.
    """
    backbone = rules.find_backbone(model)
    refuse_layers_outside(model, backbone)
    facts, numerics, record = facts_of_model(backbone), model_numerics(backbone), record_of(backbone)
    known = _of_family(family, facts)
    assert known.refuse is not None
    assert known.write is not None
    reasons = known.refuse(facts, numerics) + _without_a_place(backbone)
    if accept_numerics:
        reasons = [reason for reason in reasons if not reason.startswith("numerics")]
    if reasons:
        hint = ""
        if any(reason.startswith("numerics") for reason in reasons):
            hint = "\nTo have it computed a little differently, pass accept_numerics=True (--accept-numerics)."
        raise CheckpointError(
            f"{known.title} cannot express model {backbone.name!r}; nothing was written.\n"
            + "\n".join(f" - {reason}" for reason in reasons)
            + hint
        )
    if facts.activation != "linear" and family != "keras_hub":
        warnings.warn(
            f"{known.title} has no place for the head's activation {facts.activation!r}: what is written gives logits.",
            stacklevel=3,
        )
    targets = rules.collect_targets(backbone)
    entries = rules.export(known.rules, targets)
    written = known.write(entries, facts, record)
    final = dict(zip(entries, written.entries))  # a format renames keys, and keeps their order
    keys = {path: final[rules.translate(known.rules, "target", path)[0][1]] for path in targets}
    return known, written, keys


def _of_family(family: str, facts: Facts) -> Format:
    """The format of a family that fits a model: the first that does not refuse it, else the likeliest."""
    found = [known for known in FORMATS if known.family == family and known.write is not None]
    if not found:
        names = ", ".join(dict.fromkeys(known.family for known in FORMATS if known.write is not None))
        raise CheckpointError(f"There is no format {family!r} to write. Expected one of {names}.")
    refusals = {known.name: known.refuse(facts, known.numerics) for known in found if known.refuse}
    return min(found, key=lambda known: len(refusals[known.name]))


def _without_a_place(backbone: keras.Model) -> list[str]:
    """What no foreign format expresses, and no variable shows."""
    reasons = []
    if any(isinstance(layer, AddPositionEmbs) and layer.kind == "sincos_2d" for layer in backbone.layers):
        reasons.append("it has no place for fixed sines and cosines of positions")
    remainder = backbone.get_layer("embedding").remainder
    if remainder != "error" and None not in backbone.input_shape[1:3]:
        reasons.append(f"it has no place for remainder={remainder!r}: build the model at a size that the patch divides")
    return reasons


def save_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    format: str,
    *,
    accept_numerics: bool = False,
    force: bool = False,
) -> dict[str, str]:
    """Write a model's weights in a foreign format.

    ```python
    save_checkpoint(model, "my_vit", "huggingface")  # transformers: ViTForImageClassification.from_pretrained("my_vit")
    save_checkpoint(model, "my_vit_timm", "timm")  # timm.create_model("local-dir:my_vit_timm", pretrained=True)
    ```

    Args:
        model: a model with one Vision Transformer of this library in it, and nothing else that has weights.
        path: of the file for `"original"` (`.npz`), of the folder else.
        format: `"original"`, `"timm"`, `"huggingface"` or `"keras_hub"`.
        accept_numerics: whether a format is taken whose code computes GELU or norms otherwise than the model.
        force: whether what is at `path` is replaced. Default False.

    Returns:
        Path of each variable → key under which it was written.

    Raises:
        CheckpointError: the format cannot express the model, or there is something at `path`. Nothing was written.
    """
    check_place(path, force, is_file=format == "original")
    known, written, keys = prepare(model, format, accept_numerics)
    if known.family == "original":
        write_npz(path, written.entries)
        return keys
    with replacing_folder(path) as folder:
        known.save_arrays(folder, written.entries)
        for name, content in written.files.items():
            write_json(os.path.join(folder, name), content)
    return keys


def check_place(path: str | os.PathLike, force: bool, is_file: bool = False) -> None:
    """Find out before the work whether its result can lie at `path`.

    Raises:
        CheckpointError: there is something at `path` and no `force`, or a folder where a file shall be, or no folder to
            put it into.
    """
    name, folder = os.fspath(path), os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise CheckpointError(f"{name}: there is no folder {folder} to write into. Make it first.")
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{name} exists already: choose another name, or pass force (--force).")
    if is_file and os.path.isdir(path):
        raise CheckpointError(f"{name} is a folder, and a file is to be written: choose another name.")


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike) -> Iterator[str]:
    """A temporary folder beside `path`, which takes its place at the end, or is removed when the writing fails."""
    path = os.path.abspath(os.fspath(path))
    temporary, old = (f"{path}.{uuid.uuid4().hex}.tmp" for _ in range(2))
    try:
        os.makedirs(temporary)
        yield temporary
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(temporary, path)
    finally:
        if os.path.lexists(old) and not os.path.lexists(path):  # interrupted between the two
            os.rename(old, path)
        for leftover in (temporary, old):
            if os.path.isdir(leftover) and not os.path.islink(leftover):
                shutil.rmtree(leftover)
            elif os.path.lexists(leftover):
                os.unlink(leftover)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write JSON for people to read, UTF-8."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
