"""Pixels in: reading image files, and what the weights expect of pixels."""

import contextlib
import dataclasses
import math
import os
import warnings
from typing import IO, Any

import keras
import numpy as np
from keras import ops
from PIL import Image, ImageOps

from vit_keras.checks import as_pair
from vit_keras.layers import Bottleneck, GridTables, Patches, walk
from vit_keras.records import BIG_VISION as BIG_VISION
from vit_keras.records import HUGGING_FACE as HUGGING_FACE
from vit_keras.records import ORIGINAL, Preprocessing, Weights
from vit_keras.records import TIMM as TIMM


class ImageError(ValueError):
    """A file is not an image that can be read; the message names it."""


def read_image(source: str | os.PathLike | IO[bytes] | Image.Image) -> np.ndarray:
    """Read an image as 8-bit RGB, however it is stored.

    Grey becomes three equal channels, 16-bit values are scaled to 8, CMYK is converted, an alpha channel is dropped,
    and the rotation that the EXIF data ask for is applied.

    Args:
        source: path, binary file object or Pillow image.

    Returns:
        uint8 array (H, W, 3).

    Raises:
        ImageError: the source is missing, not an image, or broken.
    """
    name = source if isinstance(source, (str, os.PathLike)) else getattr(source, "name", "image")
    try:
        # Pillow closes what it opened itself, and leaves the caller's file object and image alone.
        opened = contextlib.nullcontext(source) if isinstance(source, Image.Image) else Image.open(source)
        with opened as image:
            return np.asarray(_to_rgb(_upright(image)), dtype=np.uint8)
    except FileNotFoundError as error:
        raise ImageError(f"{name}: there is no such file.") from error
    # Pillow's decoders raise what they meet (struct.error, TypeError, NotImplementedError …): all say "broken image".
    except Exception as error:
        raise ImageError(f"{name}: not an image that can be read ({error}).") from error


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data ask; broken EXIF data cost the rotation, not the image."""
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        # Pillow's own conversion of 16-bit grey clips at 255 instead of scaling. Modes of 32 bits do not tell their
        # range: values up to 1 (floats) are taken as 0..1, up to 255 as 8-bit, above as 16-bit.
        largest = values.max(initial=0.0)
        if image.mode == "F" and largest <= 1.0:
            scale = 1 / 255
        else:
            scale = 257.0 if image.mode.startswith("I;") or largest > 255.0 else 1.0
        image = Image.fromarray(np.clip(np.rint(values / scale), 0, 255).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")


def to_grey(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) to (H, W, 1): the luminance that Pillow's mode "L" has (ITU-R 601-2), not rounded."""
    return image.astype(np.float32) @ np.float32([[0.299], [0.587], [0.114]])


def preprocess_inputs(X: Any) -> Any:
    """Scale pixels from 0..255 to -1..1 as float32, as the original weights expect: (x - 127.5) / 127.5.

    Args:
        X: array or tensor of any shape, uint8 or float, in 0..255. Values or a layout that look like something else
            get a warning that says what they look like.

    Returns:
        float32 of the same shape: an array for an array, a tensor for a tensor.

    Reference: vision_transformer `input_pipeline.py`.
    """
    warn_of_pixels(X, stacklevel=3)
    if isinstance(X, np.ndarray):
        return (X.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    return (ops.cast(X, "float32") - 127.5) / 127.5


def preprocess(images: Any, size: tuple[int, int] | None = None, rule: Preprocessing = ORIGINAL) -> Any:
    """Bring images to what a model expects: resize, crop, scale. The same Keras ops run in Python and in a graph.

    Args:
        images: (H, W, C) or (B, H, W, C), array or tensor, values in 0..255. In a graph H and W may be unknown.
        size: (height, width) of the model's input in pixels. Default: the rule's own.
        rule: what the weights expect; `vit_keras.preprocessing.of(model)` finds it.

    Returns:
        float32 (..., *size, C): an array for an array, a tensor for a tensor.

    Raises:
        ValueError: neither `size` nor the rule says a size, or these are not images.
    """
    if size is None and rule.size is None:
        raise ValueError("Preprocessing needs a size: pass size=(height, width).")
    height, width = as_pair(rule.size if size is None else size, "size")
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) not in (3, 4) or shape[-1] is None:
        raise ValueError(
            "Expected images (H, W, C) or (B, H, W, C) as an array or tensor, with C known; read_image reads files. "
            f"Received: {type(images).__name__}{'' if shape is None else f' of shape {shape}'}"
        )
    warn_of_pixels(images, stacklevel=3)
    given = ops.shape(images)[-3:-1]  # integers, or scalar tensors where a graph does not know them
    x = ops.cast(images, "float32")
    if rule.resize == "squash":
        x = _resize(x, given, (height, width), rule)
    else:
        covering = (_outer if rule.resize == "squash_crop" else _covering)(given, (height, width), rule)
        x = _resize(x, given, covering, rule)
        (top, left) = (_centre(outer - inner, rule) for outer, inner in zip(covering, (height, width)))
        x = x[..., top : top + height, left : left + width, :]
    offset, scale = (np.asarray(values, dtype=np.float32) for values in rule.offset_and_scale(images.shape[-1]))
    x = (x - offset) / scale
    return ops.convert_to_numpy(x) if isinstance(images, np.ndarray) else x


def _outer(image: Any, size: tuple[int, int], rule: Preprocessing) -> tuple[int, int]:
    """`size` divided by the crop, rounded down as timm does; the addend undoes the rounding of 384 / (384 / 448)."""
    return math.floor(size[0] / rule.crop + 1e-6), math.floor(size[1] / rule.crop + 1e-6)


def _covering(image: Any, size: tuple[int, int], rule: Preprocessing) -> tuple[Any, Any]:
    """Height and width, aspect ratio kept, that just cover `size` divided by the crop."""
    height, width = _outer(image, size, rule)
    half = int(rule.resize == "resize_small")  # big_vision rounds to nearest, torchvision down
    h, w = image
    new_height, new_width = (2 * width * h + half * w) // (2 * w), (2 * height * w + half * h) // (2 * h)
    return _larger(height, new_height), _larger(width, new_width)


def _larger(a: int, b: Any) -> Any:
    return max(a, b) if isinstance(b, int) else ops.maximum(a, b)


def _centre(rest: Any, rule: Preprocessing) -> Any:
    """Where a crop begins: half the rest, which big_vision rounds down and torchvision to the nearest even number."""
    half = rest // 2
    return half if rule.resize == "resize_small" else half + rest % 2 * (half % 2)


def _resize(x: Any, old: Any, new: Any, rule: Preprocessing) -> Any:
    """Resize (..., H, W, C) in 0..255."""
    if rule.interpolation == "area":
        rows, columns = _area_matrix(old[0], new[0]), _area_matrix(old[1], new[1])
        return ops.einsum("...hwc,ah,bw->...abc", x, rows, columns)
    if not rule.antialias:
        return _within(_interpolate(x, new, rule), rule)
    # Pillow: along the width, then along the height, clipped and rounded to 8 bits (halves up) each time.
    x = ops.floor(_within(_interpolate(x, (old[0], new[1]), rule), rule) + 0.5)
    return ops.floor(_within(_interpolate(x, new, rule), rule) + 0.5)


def _within(x: Any, rule: Preprocessing) -> Any:
    """Bicubic interpolation overshoots."""
    return ops.clip(x, 0.0, 255.0) if rule.interpolation == "bicubic" else x


def _interpolate(x: Any, size: Any, rule: Preprocessing) -> Any:
    if all(isinstance(length, int) for length in size):
        options = {"interpolation": rule.interpolation, "antialias": rule.antialias, "data_format": "channels_last"}
        return ops.image.resize(x, tuple(size), **options)
    import tensorflow as tf  # sizes that a graph computes: Keras' op refuses them, TensorFlow's, on which it rests, not

    return tf.image.resize(x, size, method=rule.interpolation, antialias=rule.antialias)


def _area_matrix(old: Any, new: Any) -> Any:
    """(new, old): share of each old pixel in each new one, whose cell it overlaps; `tf.image.resize(method="area")`."""
    scale = ops.cast(old, "float32") / ops.cast(new, "float32")
    start = ops.cast(ops.arange(new), "float32")[:, None] * scale
    pixel = ops.cast(ops.arange(old), "float32")[None, :]
    overlap = ops.minimum(start + scale, pixel + 1) - ops.maximum(start, pixel)
    return ops.maximum(overlap, 0.0) / scale


def of(model: keras.Model) -> Preprocessing:
    """What the weights in `model` expect of pixels, its size always the model's own.

    Args:
        model: any model that contains the `embedding` layer of this library: nested, cloned, reloaded or operated on.

    Returns:
        The record in that layer, else the original code's; `size` is None for a model of any size without a table.
    """
    rule = next((Weights.from_dict(record).preprocessing for record in records(model)), ORIGINAL)
    try:
        return dataclasses.replace(rule, size=image_size_of(model))
    except ValueError:
        return dataclasses.replace(rule, size=None)


def records(model: keras.Model) -> list[dict]:
    """The records of the weights in a model, as `vit_keras.records.Weights.from_dict` reads them."""
    return [layer.record for layer in walk(model) if getattr(layer, "record", None)]


def image_size_of(model: keras.Model, wanted: Any = None) -> tuple[int, int]:
    """Height and width of the images to give a model: `wanted` if it takes them, by default its own.

    Raises:
        ValueError: the model has another fixed size, or takes any size and has none of its own.
    """
    shapes = (getattr(inner, "input_shape", None) for inner in walk(model) if isinstance(inner, keras.Model))
    # A subclassed model has none itself; the first functional one in it takes the images.
    fixed = next((tuple(shape[1:3]) for shape in shapes if isinstance(shape, tuple) and len(shape) == 4), (None, None))
    if wanted is not None:
        wanted = as_pair(wanted, "image_size")
        if any(length not in (None, asked) for length, asked in zip(fixed, wanted)):
            raise ValueError(
                f"Model {model.name!r} takes images of height and width {fixed}. Received: image_size={wanted}. Build "
                "it at that size and load its weights, which resizes the position embeddings."
            )
        return wanted
    if None not in fixed:
        return fixed
    inner = list(walk(model))
    table = next((layer for layer in inner if isinstance(layer, GridTables) and layer.grid), None)
    if table is None:
        raise ValueError(f"Model {model.name!r} takes images of any size and has none of its own: pass image_size.")
    patch = next(layer.patch_size for layer in inner if isinstance(layer, Patches))
    stride = 4 if any(layer.name == "conv_root" for layer in inner) else 1
    stride *= math.prod(layer.strides for layer in inner if isinstance(layer, Bottleneck))
    return table.grid[0] * patch[0] * stride, table.grid[1] * patch[1] * stride


def warn_of_pixels(x: Any, stacklevel: int = 2) -> None:
    """Warn when values or layout are not those of pixels in 0..255, channels last."""
    x = _concrete(x)
    if x is None or not x.size:
        return
    _warn_of_layout(x, stacklevel + 1)
    if x.dtype.kind == "f":
        low, high = float(x.min()), float(x.max())
        looks = "preprocessed already" if low < 0 else "scaled to 0..1"
        if low >= -3 and (low < 0 or 0 < high <= 1) and high <= 3:
            _warn(f"they look {looks}: they lie in [{low:.3g}, {high:.3g}]. Expected pixels in 0..255", stacklevel)


def warn_of_inputs(x: Any, rule: Preprocessing = ORIGINAL, stacklevel: int = 2) -> None:
    """Warn when values or layout are not those of images that went through `preprocess` with `rule`."""
    x = _concrete(x)
    if x is None or not x.size:
        return
    _warn_of_layout(x, stacklevel + 1)
    offset, scale = rule.offset_and_scale(x.shape[-1])
    least = min(-a / b for a, b in zip(offset, scale))
    most = max((255 - a) / b for a, b in zip(offset, scale))
    low, high = float(x.min()), float(x.max())
    if high > 4 * most:
        _warn(
            f"they look like pixels in 0..255: they lie in [{low:.3g}, {high:.3g}]. Expected [{least:.3g}, "
            f"{most:.3g}]; use vit_keras.preprocessing.preprocess",
            stacklevel,
        )


def _concrete(x: Any) -> np.ndarray | None:
    """The values of an array or an eager tensor; None for what has none yet, in a graph."""
    if isinstance(x, np.ndarray):
        return x
    try:
        return ops.convert_to_numpy(x) if ops.is_tensor(x) else None
    except Exception:  # whatever a backend raises for a tensor of a graph that is being traced
        return None


def _warn_of_layout(x: np.ndarray, stacklevel: int) -> None:
    if x.ndim in (3, 4) and x.shape[-1] > 4 and x.shape[-3] in (1, 3, 4):
        _warn(
            f"they look like channels first: their shape is {x.shape}. Expected (..., height, width, channels)",
            stacklevel,
        )


def _warn(message: str, stacklevel: int) -> None:
    warnings.warn(f"Check the images: {message}.", UserWarning, stacklevel + 1)
