"""What happens to one array between a file and a Keras variable; each transform has its inverse."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.layers import resize_patch, resize_table, square_grid
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
        resize_patch: whether a kernel of another patch size is resized to the model's.
    """

    resize: Resize
    prefix_rows: int = 0
    source_grid: tuple[int, int] | None = None
    resize_patch: bool = False


Array = np.ndarray
Shape = tuple[int, ...]


def _keep(array: Array, target: Any = None, context: Any = None) -> Array:
    return array


@dataclasses.dataclass(frozen=True)
class Transform:
    """Array of a file to value of a variable, and back.

    Args:
        layout: array of the file → the same numbers laid out as the model has them.
        back: (value, target) → array, the inverse of `layout`.
        adapt: (array in the model's layout, target, context) → value: what is done when the model is another one than
            the source: resizing, other channels.
        mismatch: (shape in the model's layout, target, context) → what is wrong with it, or None. Without it, the
            shape must be that which `back` gives.
        part: (index, count): the file holds `count` variables joined along the first axis; this is the `index`-th.
    """

    layout: Callable[[Array], Array] = _keep
    back: Callable[[Array, Target], Array] = _keep
    adapt: Callable[[Array, Target, Context], Array] = _keep
    mismatch: Callable[[Shape, Target, Context], str | None] | None = None
    part: tuple[int, int] = (0, 1)

    def read(self, array: Array) -> Array:
        """The array in the model's layout.

        Raises:
            CheckpointError: it has not the number of axes that this takes.
        """
        index, count = self.part
        try:
            if count > 1:
                size, rest = divmod(array.shape[0], count)
                if rest:
                    raise ValueError(f"{count} parts do not fit into {array.shape[0]}")
                array = array[index * size : (index + 1) * size]
            return self.layout(array)
        except (ValueError, IndexError) as error:
            raise CheckpointError(str(error)) from None

    def load(self, array: Array, target: Target, context: Context) -> Array:
        return self.adapt(self.read(array), target, context)

    def problem(self, shape: Shape, target: Target, context: Context) -> str | None:
        """What is wrong with a source array of this shape, or None."""
        expected = self.source_shape(target)
        try:
            laid_out = self.shape(shape)
        except CheckpointError:
            return f"expected {expected}, received {tuple(shape)}"
        if self.mismatch is not None:
            return self.mismatch(laid_out, target, context)
        return None if tuple(shape) == expected else f"expected {expected}, received {tuple(shape)}"

    def shape(self, shape: Shape) -> Shape:
        """Shape in the model's layout of an array that has this one in the file."""
        return self.read(np.broadcast_to(np.float32(0), shape)).shape

    def source_shape(self, target: Target) -> Shape:
        """Shape that the array has in a file."""
        shape = self.back(np.broadcast_to(np.float32(0), target.shape), target).shape
        return (shape[0] * self.part[1], *shape[1:])


SAME = Transform()


def _heads(target: Target) -> int:
    return target.layer.num_heads


# flax keeps query, key and value as (D, A, d) with biases (A, d), and the output projection as (A, d, D); Keras' Dense
# layers are flat. The number of heads is in the shapes, so a file with other heads never passes as fitting.
SPLIT_LAST = Transform(
    lambda array: array.reshape(*array.shape[:-2], -1), lambda value, t: value.reshape(*value.shape[:-1], _heads(t), -1)
)
SPLIT_FIRST = Transform(
    lambda array: array.reshape(-1, array.shape[2]), lambda value, t: value.reshape(_heads(t), -1, *value.shape[1:])
)
# PyTorch keeps dense kernels as (out, in) and those of convolutions as (out, in, h, w).
TRANSPOSED = Transform(lambda array: _axes(array, (1, 0)), lambda value, target: value.transpose(1, 0))
CONV = Transform(lambda array: _axes(array, (2, 3, 1, 0)), lambda value, target: value.transpose(3, 2, 0, 1))


def _axes(array: Array, order: tuple[int, ...]) -> Array:
    return array.transpose(order)


def part(transform: Transform, index: int, count: int) -> Transform:
    """The transform of one of `count` variables that a format keeps in one array."""
    return dataclasses.replace(transform, part=(index, count))


def _first_kernel_mismatch(shape: Shape, target: Target, context: Context) -> str | None:
    height, width, channels, filters = target.shape
    patches_agree = context.resize_patch or shape[:2] == (height, width)
    if len(shape) == 4 and patches_agree and shape[2] in (channels, 3) and shape[3] == filters:
        return None
    return f"expected {target.shape}, received {tuple(shape)} (height, width, channels, filters)"


def _adapt_first_kernel(kernel: Array, target: Target, context: Context) -> Array:
    """A kernel (h, w, 3, D) for images of other channels, and for patches of another size.

    One channel: the sum over RGB, so that a grey image gives what its RGB copy gave. Others: the three repeated, and
    scaled to keep the size of what they give. timm does the same (`adapt_input_conv`).
    """
    kernel = resize_patch(kernel, target.shape[:2])
    channels = target.shape[2]
    if channels == kernel.shape[2]:
        return kernel
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    repeated = np.concatenate([kernel] * -(-channels // 3), axis=2)[:, :, :channels]
    return repeated * np.asarray(3 / channels, kernel.dtype)


FIRST_KERNEL = Transform(adapt=_adapt_first_kernel, mismatch=_first_kernel_mismatch)
FIRST_CONV = dataclasses.replace(CONV, adapt=_adapt_first_kernel, mismatch=_first_kernel_mismatch)


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


def _position_mismatch(shape: Shape, target: Target, context: Context) -> str | None:
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


def _adapt_positions(array: Array, target: Target, context: Context) -> Array:
    layer = target.layer
    rows = array[0]
    grid = resolve_grid(len(rows) - context.prefix_rows, layer.grid, context.source_grid)
    # big_vision adds positions before the class token joins: for a table with a row for it, that row is zero.
    missing = layer.prefix_tokens - context.prefix_rows
    rows = np.concatenate([np.zeros((missing, rows.shape[1]), rows.dtype), rows]) if missing else rows
    return resize_table(rows, grid, layer.grid, context.resize, layer.prefix_tokens)[None]


POSITIONS = Transform(adapt=_adapt_positions, mismatch=_position_mismatch)
# keras-hub and others keep the table without its batch axis, (places, D).
FLAT_POSITIONS = dataclasses.replace(POSITIONS, layout=lambda array: array[None], back=lambda value, target: value[0])


def to_numpy(variable: Any) -> Array:
    """A Keras variable's value as an array."""
    # Not ops.convert_to_numpy: NumPy 2 warns of what it does with a variable.
    return np.asarray(variable)
