"""What happens to one array between a file and a Keras variable; each transform has its inverse."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.layers import resize_table, square_grid
from vit_keras.records import Resize


@dataclasses.dataclass(frozen=True)
class Target:
    """A variable of a model.

    Args:
        path: name of its top-level layer, then of the layers inside, then its own, joined by "/".
        variable: the Keras variable.
        layer: the top-level layer that owns it.
    """

    path: str
    variable: keras.Variable
    layer: keras.layers.Layer

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a load knows beside the arrays.

    Args:
        resize: rule for position tables.
        prefix_rows: rows of the file's position table that stand before its grid.
        source_grid: (height, width) of the file's table if the caller gave it.
    """

    resize: Resize
    prefix_rows: int = 0
    source_grid: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Transform:
    """Array of a file to value of a variable, and back.

    Args:
        load: (array, target, context) → value.
        export: (value, target) → array; its shape is the one a file must have.
        mismatch: (shape, target, context) → what is wrong with an array of this shape, or None.
    """

    load: Callable[[np.ndarray, Target, Context], np.ndarray]
    export: Callable[[np.ndarray, Target], np.ndarray]
    mismatch: Callable[[tuple[int, ...], Target, Context], str | None] | None = None

    def problem(self, shape: tuple[int, ...], target: Target, context: Context) -> str | None:
        """What is wrong with a source array of this shape, or None."""
        if self.mismatch is not None:
            return self.mismatch(shape, target, context)
        expected = self.source_shape(target)
        return None if tuple(shape) == expected else f"expected {expected}, received {tuple(shape)}"

    def source_shape(self, target: Target) -> tuple[int, ...]:
        """Shape that the array has in a file."""
        return self.export(np.broadcast_to(np.float32(0), target.shape), target).shape


SAME = Transform(lambda array, target, context: array, lambda value, target: value)


def _reshape(array: np.ndarray, target: Target, context: Context) -> np.ndarray:
    return array.reshape(target.shape)


def _heads(target: Target) -> int:
    return target.layer.num_heads


# flax keeps query, key and value as (D, A, d) with biases (A, d), and the output projection as (A, d, D); Keras' Dense
# layers are flat. The number of heads is in the shapes, so a file with other heads never passes as fitting.
SPLIT_LAST = Transform(_reshape, lambda value, t: value.reshape(*value.shape[:-1], _heads(t), -1))
SPLIT_FIRST = Transform(_reshape, lambda value, t: value.reshape(_heads(t), -1, *value.shape[1:]))


def _channels_mismatch(shape: tuple[int, ...], target: Target, context: Context) -> str | None:
    accepted = (target.shape, (*target.shape[:2], 3, target.shape[3]))
    return None if tuple(shape) in accepted else f"expected {target.shape}, received {tuple(shape)}"


def _adapt_channels(kernel: np.ndarray, target: Target, context: Context) -> np.ndarray:
    """A kernel (h, w, 3, D) for images of other channels.

    One: the sum over RGB, so that a grey image gives what its RGB copy gave. Others: the three repeated, and scaled to
    keep the size of what they give. timm does the same (`adapt_input_conv`).
    """
    channels = target.shape[2]
    if channels == kernel.shape[2]:
        return kernel
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    repeated = np.concatenate([kernel] * -(-channels // 3), axis=2)[:, :, :channels]
    return repeated * np.asarray(3 / channels, kernel.dtype)


FIRST_KERNEL = Transform(_adapt_channels, lambda value, target: value, _channels_mismatch)


def resolve_grid(count: int, model_grid: tuple[int, int], given: tuple[int, int] | None) -> tuple[int, int]:
    """The grid of a table of `count` places.

    Args:
        count: rows of the table without prefix rows.
        model_grid: (height, width) of the model's table.
        given: the caller's word, which rules.

    Raises:
        CheckpointError: the count fits neither what was given, nor a square, nor the model's grid.
    """
    if given is not None:
        if math.prod(given) != count:
            raise CheckpointError(f"source_grid={given} has {math.prod(given)} places, the file's table {count}")
        return given
    square = square_grid(count)
    if square is None and math.prod(model_grid) == count:
        return model_grid
    if square is None:
        raise CheckpointError(
            f"the table's {count} places form no square and do not fit the model's grid {model_grid}: "
            "pass source_grid=(height, width)"
        )
    return square


def _position_mismatch(shape: tuple[int, ...], target: Target, context: Context) -> str | None:
    width = target.shape[-1]
    if len(shape) != 3 or shape[0] != 1 or shape[2] != width:
        return f"expected (1, places, {width}), received {tuple(shape)}"
    if context.prefix_rows > target.layer.prefix_tokens:
        return "the file's table has a row for the class token, the model's has none (class_position)"
    try:
        resolve_grid(shape[1] - context.prefix_rows, target.layer.grid, context.source_grid)
    except CheckpointError as error:
        return str(error)
    return None


def _load_positions(array: np.ndarray, target: Target, context: Context) -> np.ndarray:
    layer = target.layer
    rows = array[0]
    grid = resolve_grid(len(rows) - context.prefix_rows, layer.grid, context.source_grid)
    # big_vision adds positions before the class token joins: for a table with a row for it, that row is zero.
    missing = layer.prefix_tokens - context.prefix_rows
    rows = np.concatenate([np.zeros((missing, rows.shape[1]), rows.dtype), rows]) if missing else rows
    return resize_table(rows, grid, layer.grid, context.resize, layer.prefix_tokens)[None]


POSITIONS = Transform(_load_positions, lambda value, target: value, _position_mismatch)


def to_numpy(variable: Any) -> np.ndarray:
    """A Keras variable's value as an array."""
    # Not ops.convert_to_numpy: NumPy 2 warns of what it does with a variable.
    return np.asarray(variable)
