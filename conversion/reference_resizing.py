"""Positions and patch embeddings at other sizes, for the NumPy reference: sample by sample, as their sources do it."""

import math
from typing import Any

import numpy as np
import scipy.ndimage


def resize_grid(grid: np.ndarray, size: tuple[int, int], method: str, offset: float = 0.0) -> np.ndarray:
    """Positions at another size.

    Args:
        grid: (h, w, D), float64.
        size: (H, W).
        method: "align_corners", "bicubic" or "antialiased_bicubic"; see `conversion.reference.Settings`.
        offset: in scale = (new + offset) / old, of the bicubic methods; default 0.

    Returns:
        (H, W, D); the grid itself when it has the size.
    """
    if grid.shape[:2] == tuple(size):
        return grid
    if method == "align_corners":
        # The original's own call. Its mode lets a last sample that rounding puts 1e-16 beyond the border be zero
        # (24 to 22, say), which nobody means; "nearest" keeps it.
        factors = (size[0] / grid.shape[0], size[1] / grid.shape[1], 1)
        return scipy.ndimage.zoom(grid, factors, order=1, mode="nearest")
    return _bicubic(_bicubic(grid, size[0], method, offset).swapaxes(0, 1), size[1], method, offset).swapaxes(0, 1)


def _bicubic(signal, new, method, offset):
    """(n, ...) to (new, ...) along the first axis, one sample after the other."""
    old = len(signal)
    # PyTorch's antialiased kernel has no pass for an axis that keeps its length, whatever the offset.
    if method == "antialiased_bicubic" and old == new:
        return signal
    scale = old / (new + offset)
    samples = []
    for i in range(new):
        center = (i + 0.5) * scale
        if method == "bicubic":
            taps = math.floor(center - 0.5) + np.arange(-1, 3)
            weights = _keys(taps + 0.5 - center, -0.75)
        else:
            stretch = max(scale, 1.0)
            taps = np.arange(max(int(center - 2 * stretch + 0.5), 0), min(int(center + 2 * stretch + 0.5), old))
            weights = _keys((taps + 0.5 - center) / stretch, -0.5)
            weights = weights / weights.sum()
        samples.append(np.tensordot(weights, signal[np.clip(taps, 0, old - 1)], axes=1))
    return np.stack(samples)


def _keys(x, a):
    """Cubic convolution (Keys 1981)."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def resize_patch(kernel: np.ndarray, new_size: tuple[int, int]) -> np.ndarray:
    """FlexiViT's resize of a patch embedding: w* = pinv(B^T) w, B being the bilinear resize of a patch.

    Args:
        kernel: (h, w, C, D).
        new_size: (H, W) in pixels.

    Returns:
        (H, W, C, D), float64.

    Reference: Beyer et al. 2023, "FlexiViT" (arXiv 2212.08013), section 3.4.
    """
    height, width = kernel.shape[:2]
    basis = np.eye(height * width).reshape(-1, height, width)
    # Each basis image, resized, is a column of B and so a row of its transpose.
    transposed = resize_images(basis, new_size).reshape(height * width, -1)
    flat = np.asarray(kernel, "float64").reshape(height * width, -1)
    return (np.linalg.pinv(transposed) @ flat).reshape(*new_size, *kernel.shape[2:])


def resize_images(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(B, h, w, ...) to (B, H, W, ...): bilinear, half-pixel centres, no antialiasing, as `tf.image.resize`."""
    for axis in (1, 2):
        old, new = images.shape[axis], size[axis - 1]
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        lower = np.floor(places).astype(int)
        share = (places - lower).reshape([-1 if i == axis else 1 for i in range(images.ndim)])
        upper = np.minimum(lower + 1, old - 1)
        images = np.take(images, lower, axis) * (1 - share) + np.take(images, upper, axis) * share
    return images


def source_grid(
    rows: int, tokens: int, settings: Any, image_grid: tuple[int, int], registers: int = 0
) -> tuple[tuple[int, int], int]:
    """The grid (height, width) of a stored table and its number of prefix rows.

    Args:
        rows: of the table.
        tokens: class and distillation tokens; each has a row, or none has.
        settings: for `source_grid`.
        image_grid: of the image, which tells when a table only seems to be square.
        registers: which may have rows behind those of the tokens.

    Raises:
        ValueError: the rows fit no reading, or more than one.
    """
    received = f"Received: {rows} rows, {tokens} prefix tokens, source_grid={settings.source_grid}"
    for prefix in (tokens, 0, tokens + registers):
        side = math.isqrt(max(rows - prefix, 0))
        grid = settings.source_grid or (side, side)
        if rows > prefix and math.prod(grid) == rows - prefix:
            break
    else:
        raise ValueError(f"Expected positions of a grid, with or without rows for the prefix tokens. {received}")
    # 4 x 6 patches and a class token are as many as 5 x 5 patches.
    if settings.source_grid is None and prefix < tokens and math.prod(image_grid) == rows - tokens:
        raise ValueError(f"Expected source_grid, for the rows fit the image's grid {image_grid} too. {received}")
    return grid, prefix
