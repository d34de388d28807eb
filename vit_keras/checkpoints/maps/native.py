"""Models of this library as a source: their own variables, under their own names.

So what can be changed while a file is loaded (image size, patch size, classes, channels) can be changed of a model.
"""

import math
from collections.abc import Collection

import keras
import numpy as np

from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import Entry
from vit_keras.checkpoints.facts import POSITIONS
from vit_keras.checkpoints.format import Format
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL, SAME, Context, Target, Transform, to_numpy
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.layers import GridTables, resize_table, walk
from vit_keras.records import ALIGN_CORNERS, ORIGINAL, Numerics

ADAPTED = {"embedding/kernel": FIRST_KERNEL, "conv_root/kernel": FIRST_KERNEL, POSITIONS: TABLE}


def _owner(target: Target) -> GridTables | None:
    """The layer, inside the block perhaps, to whose tables a variable belongs."""
    tables = (layer for layer in walk(target.layer) if isinstance(layer, GridTables))
    return next((layer for layer in tables if any(target.variable is table for table in layer.weights)), None)


def _table_mismatch(shape: tuple[int, ...], target: Target, context: Context) -> str | None:
    layer, width = _owner(target), target.shape[-1]
    if layer is None or context.source_grid is None:
        return None if tuple(shape) == target.shape else f"expected {target.shape}, received {tuple(shape)}"
    (rows, columns), prefix = layer.table_grid(target.variable.name, context.source_grid)
    if shape[-1:] == (width,) and math.prod(shape[:-1]) == prefix + rows * columns:
        return None
    return f"expected a table of the grid {context.source_grid} and width {width}, received {tuple(shape)}"


def _adapt_table(array: np.ndarray, target: Target, context: Context) -> np.ndarray:
    layer = _owner(target)
    if layer is None or context.source_grid is None:
        return array
    (old, prefix), (new, _) = (layer.table_grid(target.variable.name, g) for g in (context.source_grid, layer.grid))
    return resize_table(array.reshape(-1, array.shape[-1]), old, new, context.resize, prefix).reshape(target.shape)


GRID_TABLE = Transform(adapt=_adapt_table, mismatch=_table_mismatch)


def recognises(keys: Collection[str]) -> bool:
    """Never: a model says what it is."""
    return False


def format_of(backbone: keras.Model) -> Format:
    """The format whose table names each variable of a model after itself."""
    targets = rules.collect_targets(backbone)
    return Format(
        name="keras",
        family="keras",
        title="a Keras model of this library",
        rules=tuple(Rule(path, path, _transform(target)) for path, target in targets.items()),
        numerics=Numerics(),
        resize=ALIGN_CORNERS,
        preprocessing=ORIGINAL,
        recognises=recognises,
    )


def _transform(target: Target) -> Transform:
    return ADAPTED.get(target.path, GRID_TABLE if _owner(target) else SAME)


def entries_of(backbone: keras.Model) -> dict[str, Entry]:
    """Path → lazy value of every variable."""
    targets = rules.collect_targets(backbone)
    return {path: _entry(target) for path, target in targets.items()}


def _entry(target: Target) -> Entry:
    dtype = keras.backend.standardize_dtype(target.variable.dtype)
    return Entry(target.shape, np.dtype(dtype), lambda: to_numpy(target.variable))
