"""Functions of the old vit-keras package's `utils`, on today's code."""

import io
import os
from typing import IO, Any

import numpy as np
import requests
from PIL import Image

from vit_keras import labels, preprocessing
from vit_keras.predictor import decode_predictions as decode_predictions


def get_imagenet_classes() -> list[str]:
    """The names of the 1,000 ImageNet-2012 classes, in the order of the weights' outputs."""
    return labels.load("imagenet1k")


def read(
    filepath_or_buffer: str | os.PathLike | IO[bytes] | Image.Image, size: Any, timeout: float | None = 30.0
) -> np.ndarray:
    """Read an image and squash it to a size.

    Args:
        filepath_or_buffer: path, address (`https://…`), binary file object or Pillow image.
        size: an integer or a pair (height, width), in pixels.
        timeout: seconds to wait for an answer from an address.

    Returns:
        uint8 array (height, width, 3), RGB.

    Raises:
        vit_keras.preprocessing.ImageError: the source is not an image that can be read.
    """
    if isinstance(filepath_or_buffer, str) and filepath_or_buffer.startswith(("http://", "https://")):
        filepath_or_buffer = _fetch(filepath_or_buffer, timeout)
    rule = preprocessing.Preprocessing(value_range=(0.0, 255.0))
    pixels = preprocessing.preprocess(preprocessing.read_image(filepath_or_buffer), size, rule)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _fetch(url: str, timeout: float | None) -> io.BytesIO:
    try:
        response = requests.get(url, timeout=timeout)
        response.raise_for_status()
    except requests.RequestException as error:
        raise preprocessing.ImageError(f"{url}: the image could not be fetched ({error}).") from error
    return io.BytesIO(response.content)
