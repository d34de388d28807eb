"""Pixels in: reading image files, and what the weights expect of pixels."""

import contextlib
import os
from typing import IO, Any

import keras
import numpy as np
from keras import ops
from PIL import Image, ImageOps

from vit_keras.layers import walk
from vit_keras.records import Preprocessing, Weights

ORIGINAL = Preprocessing()  # what the original weights expect


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


def preprocess_inputs(X: Any) -> Any:
    """Scale pixels from 0..255 to -1..1 as float32, as the original weights expect: (x - 127.5) / 127.5.

    Args:
        X: array or tensor of any shape, uint8 or float, in 0..255.

    Returns:
        float32 of the same shape: an array for an array, a tensor for a tensor.

    Reference: vision_transformer `input_pipeline.py`.
    """
    if isinstance(X, np.ndarray):
        return (X.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    return (ops.cast(X, "float32") - 127.5) / 127.5


def preprocess(image: np.ndarray, size: tuple[int, int], rule: Preprocessing = ORIGINAL) -> np.ndarray:
    """Bring one image to what a model expects.

    Args:
        image: (H, W, C), values in 0..255.
        size: (height, width) of the model's input.
        rule: what the weights expect.

    Returns:
        float32 array (*size, C).
    """
    x = ops.image.resize(
        ops.convert_to_tensor(np.asarray(image, dtype=np.float32)),
        size,
        interpolation=rule.interpolation,
        antialias=rule.antialias,
        data_format="channels_last",
    )
    mean, std = (np.asarray(values, dtype=np.float32) for values in (rule.mean, rule.std))
    return (ops.convert_to_numpy(x) - mean) / std


def of(model: keras.Model) -> Preprocessing:
    """What the weights in `model` expect of pixels: the record in its `embedding` layer, else the original code's."""
    for layer in walk(model):
        record = getattr(layer, "record", None)
        if record:
            return Weights.from_dict(record).preprocessing
    return ORIGINAL
