"""Arguments checked the same way everywhere, each with one clear sentence. Imports no Keras."""

import math
import operator
from collections.abc import Iterable
from typing import Any


def as_int(value: Any, name: str, minimum: int = 1) -> int:
    """Return `value` as a Python int; accepts NumPy integers, refuses bools, floats and values below `minimum`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}. Received: {name}={value!r}")
    return number


def as_pair(value: Any, name: str) -> tuple[int, int]:
    """Return a size as (height, width): an integer stands for both, any iterable of two integers is taken as is."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", True):
        values = tuple(value)
        if len(values) == 2:
            return as_int(values[0], name), as_int(values[1], name)
        raise ValueError(f"`{name}` must be one integer or a pair (height, width). Received: {name}={value!r}")
    size = as_int(value, name)
    return size, size


def as_choice(value: Any, name: str, choices: tuple) -> Any:
    """Return `value` if it is one of `choices`, else raise a ValueError that lists them."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {allowed}. Received: {name}={value!r}")
    return value


def as_rate(value: Any, name: str) -> float:
    """Return a dropout-like rate as a float in [0, 1)."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"`{name}` must be a rate in [0, 1). Received: {name}={value!r}")
    return rate


def as_positive(value: Any, name: str) -> float:
    """Return `value` as a Python float above zero; accepts NumPy numbers."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ValueError(f"`{name}` must be a number above 0. Received: {name}={value!r}")
    return number


REMAINDERS = ("error", "pad", "crop")


def grid_of(size: tuple[int, int], patch_size: tuple[int, int], remainder: str, stride: int = 1) -> tuple[int, int]:
    """Number of patches (height, width) in a feature map of `size` (height, width).

    Args:
        size: height and width of the map that is cut into patches, in its own pixels.
        patch_size: height and width of a patch, in the same pixels.
        remainder: `"error"` refuses a map the patch does not divide, `"pad"` rounds up, `"crop"` rounds down.
        stride: image pixels per map pixel, used to name image sizes in the error.

    Raises:
        ValueError: the patch does not divide the map under `"error"`, or no whole patch fits into it.
    """
    if remainder == "pad":
        return -(-size[0] // patch_size[0]), -(-size[1] // patch_size[1])
    rows, columns = size[0] // patch_size[0], size[1] // patch_size[1]
    uneven = any(length % patch for length, patch in zip(size, patch_size))
    if not rows or not columns or (uneven and remainder == "error"):
        below = [max(length // patch, 1) * patch * stride for length, patch in zip(size, patch_size)]
        above = [-(-length // patch) * patch * stride for length, patch in zip(size, patch_size)]
        what = "An image" if stride == 1 else f"A feature map (1/{stride} of the image)"
        raise ValueError(
            f"{what} of height and width {size} is not divisible into patches of {patch_size}. The nearest image "
            f"sizes that work are {tuple(below)} and {tuple(above)}; or pass remainder='pad' or remainder='crop'."
        )
    return rows, columns
