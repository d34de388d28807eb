"""Tables of position embeddings from one grid to another, as two matrix products."""

import math
from typing import Any

import numpy as np

from vit_keras.records import Resize


def interpolation_matrix(new: Any, old: int, rule: Resize, xp: Any = np) -> Any:
    """Weights (new, old) that interpolate a signal of `old` samples at `new` places.

    Args:
        new: number of output samples; may be a scalar tensor with `xp=keras.ops`.
        old: number of input samples.
        rule: interpolation rule.
        xp: `numpy` (float64, default) or `keras.ops` (float32).

    Returns:
        A matrix (new, old) whose rows sum to 1.

    Reference: vision_transformer `checkpoint.py`, `interpolate_posembed` (`scipy.ndimage.zoom`, order 1) for
        `align_corners`; Keys 1981 with a = -0.75 and replicated borders, as PyTorch's `interpolate` has it, for
        `bicubic`; with a = -0.5 and normalised rows, as Pillow and PyTorch's `antialias=True` have it, for
        `antialiased_bicubic`.
    """
    dtype = "float64" if xp is np else "float32"
    sources = xp.arange(old, dtype=dtype)[None, :]
    targets = xp.arange(new, dtype=dtype)[:, None]
    new = new if isinstance(new, int) else xp.cast(new, dtype)
    if rule.method == "align_corners":
        places = targets * ((old - 1) / (max(new - 1, 1) if isinstance(new, int) else xp.maximum(new - 1, 1)))
        return xp.maximum(1.0 - xp.abs(places - sources), 0.0)
    scale = old / (new + rule.offset)
    places = (targets + 0.5) * scale - 0.5
    if rule.method == "bicubic":
        taps = [xp.floor(places) + tap for tap in (-1, 0, 1, 2)]
        # Taps beyond the border fall on the border sample.
        weights = [_cubic(places - tap, -0.75, xp) * _equal(xp.clip(tap, 0, old - 1), sources, xp) for tap in taps]
        return weights[0] + weights[1] + weights[2] + weights[3]
    stretch = max(scale, 1.0) if isinstance(scale, float) else xp.maximum(scale, 1.0)
    weights = _cubic((places - sources) / stretch, -0.5, xp)
    return weights / xp.sum(weights, axis=1, keepdims=True)


def _equal(a, b, xp):
    return xp.where(xp.abs(a - b) < 0.5, 1.0, 0.0)


def _cubic(x, a, xp):
    """Keys' cubic convolution kernel."""
    x = xp.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return xp.where(x <= 1, near, xp.where(x < 2, far, xp.zeros_like(x)))


def resize_table(table: Any, old_grid: tuple, new_grid: tuple, rule: Resize, prefix: int = 0, xp: Any = np) -> Any:
    """Interpolate a table of embeddings that lie on a grid.

    Args:
        table: (prefix + h * w, D), the grid in row-major order.
        old_grid, new_grid: (height, width); the new one may hold scalar tensors with `xp=keras.ops`.
        rule: interpolation rule.
        prefix: leading rows without a place on the grid, kept bit for bit.
        xp: `numpy` (computes in float64) or `keras.ops`.

    Returns:
        (prefix + H * W, D) of the table's dtype; the table itself when the grids are equal.
    """
    if all(isinstance(length, int) for length in new_grid) and tuple(old_grid) == tuple(new_grid):
        return table
    width = table.shape[-1]
    rows = interpolation_matrix(new_grid[0], old_grid[0], rule, xp)
    columns = interpolation_matrix(new_grid[1], old_grid[1], rule, xp)
    grid = table[prefix:].astype(rows.dtype) if xp is np else xp.cast(table[prefix:], "float32")
    grid = xp.matmul(rows, xp.reshape(grid, (old_grid[0], old_grid[1] * width)))  # (H, w * D)
    grid = xp.matmul(columns, xp.reshape(grid, (-1, old_grid[1], width)))  # (H, W, D)
    grid = xp.reshape(grid, (-1, width))
    if xp is np:
        return np.concatenate([table[:prefix], grid.astype(table.dtype)])
    return xp.concatenate([table[:prefix], xp.cast(grid, table.dtype)], axis=0)


def resize_patch(kernel: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """A patch embedding for patches of another size that gives a resized patch the token of the patch.

    Args:
        kernel: (h, w, C, D).
        size: new (height, width) in pixels.

    Returns:
        (height, width, C, D) of the kernel's dtype; the kernel itself when the sizes are equal.

    Reference: Beyer et al. 2023, "FlexiViT" (arXiv 2212.08013), section 3.4: the pseudo-inverse of the transposed
        resize, w' = pinv(B^T) w, B being TensorFlow's bilinear one; big_vision `models/proj/flexi/vit.py`.
    """
    if tuple(kernel.shape[:2]) == tuple(size):
        return kernel
    # B is a Kronecker product of one matrix an axis, and so is its pseudo-inverse.
    rows, columns = (np.linalg.pinv(_bilinear(new, old).T) for new, old in zip(size, kernel.shape[:2]))
    return np.einsum("Hh,Ww,hwcd->HWcd", rows, columns, kernel.astype("float64"), optimize=True).astype(kernel.dtype)


def _bilinear(new: int, old: int) -> np.ndarray:
    """(new, old): half-pixel centres, no antialiasing, as `tf.image.resize` has it."""
    places = np.clip((np.arange(new) + 0.5) * (old / new) - 0.5, 0, old - 1)
    return np.maximum(1.0 - np.abs(places[:, None] - np.arange(old)[None]), 0.0)


def square_grid(count: int) -> tuple[int, int] | None:
    """The square grid of `count` places, or None."""
    side = math.isqrt(count) if count > 0 else 0
    return (side, side) if side and side * side == count else None
