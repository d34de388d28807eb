"""A checkpoint, opened: recognised and brought to today's names, its arrays still unread."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_keras.checkpoints import eras
from vit_keras.checkpoints.arrays import CheckpointError, Entry, open_arrays
from vit_keras.checkpoints.facts import Facts, facts_of
from vit_keras.checkpoints.maps import jax
from vit_keras.records import ORIGINAL, Preprocessing, Resize


class Numerics(NamedTuple):
    """GELU form and LayerNorm epsilon that weights were trained with."""

    gelu: str
    epsilon: float


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, in today's names.

    Args:
        name: file name, or "the checkpoint" for a mapping.
        entries: key → lazy array.
        facts: the architecture it was saved from.
        numerics: of the format.
        prefix_rows: rows of the position table before its grid.
        left_out: keys that are no parameters of the model (optimiser state).
        resize: rule for position tables of other grids.
        source_grid: (height, width) of the position table, when it is known otherwise than by its count.
        labels: name of the head's label set, when it is known.
        preprocessing: what the weights expect of pixels.
    """

    name: str
    entries: dict[str, Entry]
    facts: Facts
    numerics: Numerics
    prefix_rows: int
    left_out: tuple[str, ...] = ()
    resize: Resize = jax.RESIZE
    source_grid: tuple[int, int] | None = None
    labels: str | None = None
    preprocessing: Preprocessing = ORIGINAL


def open_checkpoint(source: str | os.PathLike | Mapping[str, Any]) -> Checkpoint:
    """Open a checkpoint in the original layout of any era; arrays are read when they are needed.

    Args:
        source: path of an `.npz` file, or a mapping from key to array.

    Raises:
        CheckpointError: it cannot be read, or is not a Vision Transformer in this layout.
    """
    name = "the checkpoint" if isinstance(source, Mapping) else os.path.basename(os.fspath(source))
    entries, left_out = eras.strip_training_state(open_arrays(source))
    try:
        entries = eras.squeeze_group_norms(eras.rename_pre_linen(eras.unstack_blocks(entries)))
        entries, prefix_rows = eras.lower_positions(entries)
        facts = facts_of(entries, prefix_rows)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return Checkpoint(name, entries, facts, Numerics(jax.GELU, jax.EPSILON), prefix_rows, left_out)
