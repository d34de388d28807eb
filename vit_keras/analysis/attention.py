"""Attention probabilities of any model that holds the blocks of this library."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from vit_keras import preprocessing
from vit_keras.layers import TransformerBlock, walk


def attention_scores(model: keras.Model, images: Any, blocks: Sequence[int] = (-1,)) -> dict[int, np.ndarray]:
    """Attention probabilities of some blocks, without changing the model or its outputs.

    ```python
    scores = attention_scores(model, images, blocks=(0, -1))   # {0: (B, A, N, N), -1: (B, A, N, N)}
    ```

    Args:
        model: any model with `TransformerBlock` layers in it: functional, nested, subclassed, reloaded, or inside your
            own layers. Several threads may ask at once.
        images: what the model takes, (B, H, W, C) preprocessed; a list or dict for a model with several inputs.
        blocks: indices of the blocks in the order in which the model holds them; negative ones count from the end.
            Only these blocks' probabilities are kept.

    Returns:
        index as asked → float32 array (B, A, N, N); rows sum to 1; prefix tokens come first. Of a block that the model
        calls more than once, the last call's.

    Raises:
        ValueError: the model has no blocks, an index is beyond them, or the model does not call a block when it is
            called (its `call` is a `tf.function` that was traced before, or it leaves the block out).
    """
    found = [layer for layer in walk(model) if isinstance(layer, TransformerBlock)]
    beyond = [index for index in blocks if not -len(found) <= index < len(found)]
    if not found or beyond:
        raise ValueError(
            f"`blocks` must be indices into the model's Transformer blocks, of which {model.name!r} has {len(found)}. "
            f"Received: blocks={tuple(blocks)}"
        )
    places = {index: index % len(found) for index in blocks}
    if isinstance(images, np.ndarray):
        preprocessing.warn_of_inputs(images, preprocessing.of(model), stacklevel=3)
    images = keras.tree.map_structure(ops.convert_to_tensor, images)
    with _LOCK, contextlib.ExitStack() as stack:
        seen = {place: stack.enter_context(_scores_of(found[place])) for place in set(places.values())}
        model(images, training=False)
    silent = sorted(found[place].name for place, scores in seen.items() if not scores)
    if silent:
        raise ValueError(
            f"Model {model.name!r} did not call {', '.join(silent)} as a layer. If its `call` is a `tf.function`, take "
            "the decorator off; `model.predict` compiles it anyway."
        )
    return {index: ops.convert_to_numpy(seen[place][-1]) for index, place in places.items()}


# Two watchers of one block would take each other's place.
_LOCK = threading.RLock()


@contextlib.contextmanager
def _scores_of(block: TransformerBlock) -> Iterator[list]:
    """Collect the probabilities of a block while this thread calls it."""
    call, kept, watcher = block.call, [], threading.get_ident()

    @functools.wraps(call)
    def watched(*args, **kwargs):
        if threading.get_ident() != watcher:
            return call(*args, **kwargs)
        outputs, scores = call(*args, **{**kwargs, "return_attention_scores": True})
        if not isinstance(scores, keras.KerasTensor) and _has_value(scores):
            kept.append(scores)
        return (outputs, scores) if kwargs.get("return_attention_scores") else outputs

    # Past Keras' own __setattr__: this is no part of the layer's state.
    own = vars(block).get("call")
    object.__setattr__(block, "call", watched)
    try:
        yield kept
    finally:
        if own is None:
            object.__delattr__(block, "call")
        else:
            object.__setattr__(block, "call", own)


def _has_value(tensor: Any) -> bool:
    """Whether a tensor is computed, not a symbol of a graph that is being traced."""
    return keras.backend.backend() != "tensorflow" or hasattr(tensor, "numpy")
