"""Attention probabilities of any model that holds the blocks of this library."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from vit_keras.layers import TransformerBlock, walk


def attention_scores(model: keras.Model, images: Any, blocks: Sequence[int] = (-1,)) -> dict[int, np.ndarray]:
    """Attention probabilities of some blocks, without changing the model or its outputs.

    ```python
    scores = attention_scores(model, images, blocks=(0, -1))   # {0: (B, A, N, N), -1: (B, A, N, N)}
    ```

    Args:
        model: any model with `TransformerBlock` layers in it: functional, nested, subclassed or reloaded.
        images: what the model takes, (B, H, W, C) preprocessed.
        blocks: indices of the blocks in the order in which the model holds them; negative ones count from the end.
            Only these blocks' probabilities are kept.

    Returns:
        index as asked → float32 array (B, A, N, N); rows sum to 1; prefix tokens come first.

    Raises:
        ValueError: the model has no blocks, or an index is beyond them.
    """
    found = [layer for layer in walk(model) if isinstance(layer, TransformerBlock)]
    beyond = [index for index in blocks if not -len(found) <= index < len(found)]
    if not found or beyond:
        raise ValueError(
            f"`blocks` must be indices into the model's Transformer blocks, of which {model.name!r} has {len(found)}. "
            f"Received: blocks={tuple(blocks)}"
        )
    places = {index: index % len(found) for index in blocks}
    with contextlib.ExitStack() as stack:
        seen = {place: stack.enter_context(_scores_of(found[place])) for place in set(places.values())}
        model(ops.convert_to_tensor(images), training=False)
    return {index: ops.convert_to_numpy(seen[place][-1]) for index, place in places.items()}


@contextlib.contextmanager
def _scores_of(block: TransformerBlock) -> Iterator[list]:
    """Collect the probabilities of a block while it is called."""
    call, kept = block.call, []

    @functools.wraps(call)
    def watched(*args, **kwargs):
        outputs, scores = call(*args, **{**kwargs, "return_attention_scores": True})
        kept.append(scores)
        return (outputs, scores) if kwargs.get("return_attention_scores") else outputs

    # Past Keras' own __setattr__: this is no part of the layer's state.
    object.__setattr__(block, "call", watched)
    try:
        yield kept
    finally:
        object.__delattr__(block, "call")
