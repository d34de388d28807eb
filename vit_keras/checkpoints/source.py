"""A checkpoint, opened: its format recognised, its keys brought to the table's, its arrays still unread."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import keras

from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import CheckpointError, Entry
from vit_keras.checkpoints.facts import Facts, facts_of
from vit_keras.checkpoints.files import open_file
from vit_keras.checkpoints.format import Format, PrefixRows
from vit_keras.checkpoints.maps import FORMATS, jax, native
from vit_keras.checkpoints.model import (
    architecture_of,
    facts_of_model,
    load_keras,
    model_numerics,
    record_of,
    refuse_layers_outside,
)
from vit_keras.checks import as_pair
from vit_keras.layers import GridTables, square_grid, walk
from vit_keras.records import ORIGINAL, Numerics, Preprocessing, Resize


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, its arrays under the keys of its format's table.

    Args:
        name: file name, or "the checkpoint" for a mapping.
        format: of the file.
        entries: key → lazy array.
        facts: the architecture it was saved from.
        numerics: that the weights were trained with.
        left_out: keys that are no parameters of the model (optimiser state, decoders).
        resize: rule for position tables of other grids.
        source_grid: (height, width) of the position table, when it is known otherwise than by its count.
        labels: name of the head's label set, or its class names, when they are known.
        preprocessing: what the weights expect of pixels.
        says_pooling: whether the pooling among the facts was said by a configuration, and not taken from the keys.
        architecture: further fields of `vit_keras.spec.ViTSpec` that the source decides.
    """

    name: str
    format: Format
    entries: dict[str, Entry]
    facts: Facts
    numerics: Numerics
    left_out: tuple[str, ...]
    resize: Resize
    source_grid: tuple[int, int] | None = None
    labels: str | tuple[str, ...] | None = None
    preprocessing: Preprocessing = ORIGINAL
    says_pooling: bool = False
    architecture: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def open_checkpoint(
    source: str | os.PathLike | Mapping[str, Any],
    format: str | None = None,
    source_grid: Any = None,
) -> Checkpoint:
    """Open a checkpoint of any known format and era; arrays are read when they are needed.

    Args:
        source: path of a file, of a folder with weights and `config.json`, or a mapping from key to array. A `.keras`
            file of this library is one too.
        format: name of the format. None (default) recognises it by the keys.
        source_grid: (height, width) of the stored position table, where its count can be read in two ways.

    Raises:
        CheckpointError: it cannot be read, is no Vision Transformer in a known format, or its position table can be
            read in two ways.
        ImportError: the package that reads this kind of file is not installed.
    """
    name = "" if isinstance(source, Mapping) else os.fspath(source)
    if format == KERAS and not name.endswith(".keras"):
        raise CheckpointError(f"Expected a .keras file for format={KERAS!r}. Received: {name or 'a mapping'}")
    if not name.endswith(".keras") or format not in (None, KERAS):
        return _open_foreign(source, format, source_grid)
    try:
        return _open_foreign(source, None, source_grid)  # of the old vit-keras, whose architecture cannot be built
    except CheckpointError:
        return checkpoint_of(load_keras(name))


KERAS = "keras"


def _open_foreign(source: str | os.PathLike | Mapping[str, Any], format: str | None, source_grid: Any) -> Checkpoint:
    opened = open_file(source)
    try:
        known_format = find_format(opened.entries, format)
        entries, left_out = known_format.canonical(opened.entries, opened.config)
        known = known_format.known(opened.config, opened.entries.keys())
        grid = None if source_grid is None else as_pair(source_grid, "source_grid")
        numerics = known.pop("numerics", known_format.numerics)
        image_size, shapes = known.pop("image_size", None), known.pop("shapes", {})
        heads = known_format.heads(opened.entries)
        facts, grid = _facts(known_format, entries, numerics, heads, grid, image_size)
        said = {name: known.pop(name) for name in ("num_heads", "pooling") if name in known}
        facts = dataclasses.replace(facts, **said)
        _check_said(facts, shapes, said.get("num_heads"))
        if not facts.places and image_size:
            known["architecture"] = {"image_size": image_size, **known.get("architecture", {})}
    except CheckpointError as error:
        raise CheckpointError(f"{opened.name}: {error}") from None
    fields = {"resize": known_format.resize, "preprocessing": known_format.preprocessing, **known}
    return Checkpoint(
        opened.name,
        known_format,
        entries,
        facts,
        numerics,
        left_out,
        source_grid=grid,
        says_pooling="pooling" in said,
        **fields,
    )


def _check_said(facts: Facts, shapes: Mapping[str, Any], heads: float | None) -> None:
    """
    Raises:
        CheckpointError: a configuration contradicts the arrays: some are missing, or it is of another model.
    """
    for name, value in shapes.items():
        if value is not None and value != getattr(facts, name):
            raise CheckpointError(
                f"config.json says {name}={value!r}, the arrays have {getattr(facts, name)!r}: some are missing, or it "
                "belongs to another model"
            )
    if heads is not None and (heads != int(heads) or facts.width % heads):
        raise CheckpointError(f"config.json says {heads} attention heads, which do not divide the width {facts.width}")


def checkpoint_of(model: keras.Model) -> Checkpoint:
    """A model of this library as a checkpoint: what can be changed when a file is loaded can be changed of it.

    Args:
        model: a model with one Vision Transformer of this library in it.

    Raises:
        CheckpointError: it holds none, or several.
    """
    backbone = rules.find_backbone(model)
    refuse_layers_outside(model, backbone)
    record, tables = record_of(backbone), [layer for layer in walk(backbone) if isinstance(layer, GridTables)]
    return Checkpoint(
        record.source or model.name,
        native.format_of(backbone),
        native.entries_of(backbone),
        facts_of_model(backbone),
        model_numerics(backbone),
        left_out=(),
        resize=tables[0].resize if tables else record.resize,
        source_grid=tables[0].grid if tables else None,
        labels=record.labels,
        preprocessing=record.preprocessing,
        says_pooling=True,
        architecture=architecture_of(backbone),
    )


def find_format(entries: Mapping[str, Entry], name: str | None) -> Format:
    """The format of this name, or the one whose keys these are.

    Raises:
        CheckpointError: there is none.
    """
    named = [known for known in FORMATS if name in (None, known.name, known.family)]
    if not named:
        names = ", ".join(sorted({known.family for known in FORMATS}))
        raise CheckpointError(f"There is no format {name!r}. Expected one of {names}.")
    return next((known for known in named if known.recognises(entries.keys())), named[0] if name else jax.FORMAT)


def _facts(
    known: Format,
    entries: dict[str, Entry],
    numerics: Numerics,
    heads: int | None,
    grid: tuple[int, int] | None,
    image_size: tuple[int, int] | None,
) -> tuple[Facts, tuple[int, int] | None]:
    """The facts, and the grid of the position table where the caller or a configuration says it."""
    shapes = rules.shapes_of(known.rules, entries)
    choices = known.prefix_rows(entries.keys())
    facts = facts_of(shapes, choices.usual[0], heads, numerics)
    if facts is None:
        title = known.title if known.recognises(entries.keys()) else "a layout known here"
        raise CheckpointError(f"Not a Vision Transformer in {title}: {_looks_like(entries)}.")
    count = facts.places + facts.prefix_rows
    if grid is None and image_size is not None:
        said = facts.grid_of(image_size)
        grid = said if any(count - rows == math.prod(said) for rows in sum(choices, ())) else None
    rows = _prefix_rows(count, choices, grid)
    # A grid that does not fit is told where it meets the table.
    fits = grid is None or math.prod(grid) == count - rows
    return facts_of(shapes, rows, heads, numerics, grid if fits else None) or facts, grid


def _prefix_rows(count: int, rows: PrefixRows, grid: tuple[int, int] | None) -> int:
    """How many of `count` rows of a position table stand before its grid.

    Raises:
        CheckpointError: more than one reading is likely: two squares, or a square that would be unusual.
    """
    choices = (*rows.usual, *rows.unusual)
    if grid is not None:
        return next((before for before in choices if count - before == math.prod(grid)), choices[0])
    squares = {before: square for before in choices if (square := square_grid(count - before))}
    if len(squares) == 1 and not squares.keys() & set(rows.unusual):
        return next(iter(squares))
    if not squares:
        return choices[0]
    readings = []
    for before in choices:
        square = squares.get(before)
        readings.append(
            f"{before} before {f'a grid of {square[0]}x{square[1]}' if square else f'{count - before} others'}"
        )
    raise CheckpointError(
        f"The position table's {count} rows can be read in two ways, {' or '.join(readings)}: "
        "pass source_grid=(height, width)"
    )


def _looks_like(entries: Mapping[str, Entry]) -> str:
    if not entries:
        return "it holds no arrays"
    if any(key.startswith("MixerBlock_") for key in entries):
        return "these are the keys of an MLP-Mixer"
    if any("transformer_block/attention/" in key for key in entries):
        return (
            "these are weights of a model of this library, without its architecture. Build the model, call its "
            "load_weights, and save it as .keras"
        )
    if any("relative_position" in key for key in entries):
        return "these are the keys of a model with relative positions, such as BEiT or Swin"
    if any(key.startswith(("layer1.", "layer4.", "resnet.")) for key in entries):
        return "these are the keys of a ResNet"
    if any(key.startswith(("blocks.", "vit.", "model.", "encoder.")) for key in entries):
        return f"these are the keys of a PyTorch model, the first {', '.join(sorted(entries)[:4])}"
    return f"its first keys are {', '.join(sorted(entries)[:4])}"
