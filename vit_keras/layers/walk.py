"""Finding layers in models, however deeply they are nested."""

from collections.abc import Iterator
from typing import Any

import keras


def walk(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Yield `layer` and every layer inside it, each once: of models (nested, Sequential, subclassed), of wrappers, and
    of a user's own layers that keep layers in attributes.
    """
    seen = set()
    waiting = [layer]
    while waiting:
        layer = waiting.pop(0)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        waiting[:0] = layer.layers if isinstance(layer, keras.Model) else _layers_in(list(vars(layer).values()))


def _layers_in(value: Any) -> list[keras.layers.Layer]:
    """The layers among attributes, inside lists and dicts too."""
    if isinstance(value, keras.layers.Layer):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [layer for item in value for layer in _layers_in(item)] if isinstance(value, (list, tuple)) else []
