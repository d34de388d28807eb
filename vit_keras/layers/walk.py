"""Finding layers in models, however deeply they are nested."""

from collections.abc import Iterator

import keras


def walk(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Yield `layer` and every layer inside it: of models (nested, Sequential, subclassed) and of wrappers, each once.

    Layers inside a single composite layer, such as a block's MLP, are not entered.
    """
    seen = set()
    waiting = [layer]
    while waiting:
        layer = waiting.pop(0)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        inner = getattr(layer, "layers", None) or [getattr(layer, "layer", None)]
        waiting[:0] = [child for child in inner if isinstance(child, keras.layers.Layer)]
