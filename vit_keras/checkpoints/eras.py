"""Older and newer layouts of the original format, brought to the names the code saves today.

Each function takes and returns key → entry, and leaves alone what is not its era. Each begins with its story.
"""

import operator
import re

import numpy as np

from vit_keras.checkpoints.arrays import CheckpointError, Entry

Entries = dict[str, Entry]

POSITIONS_KEY = "Transformer/posembed_input/pos_embedding"
TOP_LEVEL_POSITIONS_KEY = "pos_embedding"

_RELEASED_NAMES = {
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
}
_BLOCK_PART = re.compile(r"(Transformer/encoderblock_\d+/)([^/]+)(/.+)")
_GROUP_NORM = re.compile(r"(?:.+/)?gn(?:\d|_root|_proj)/(?:scale|bias)")
_STACKED = "Transformer/encoderblock/"
_MOST_BLOCKS = 1000  # no published model has a tenth of that; a hostile header can claim a billion


def strip_training_state(entries: Entries) -> tuple[Entries, tuple[str, ...]]:
    """Training checkpoints of flax hold parameters beside the optimiser's state.

    The old `flax.optim` wrote `opt/target/...` beside `opt/state/...`; big_vision writes `params/...`, with `opt/...`
    beside it. Returns the parameters, and the keys that were left out.
    """
    for prefix in ("opt/target/", "params/"):
        if any(key.startswith(prefix) for key in entries):
            kept = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
            return kept, tuple(key for key in entries if not key.startswith(prefix))
    return entries, ()


def unstack_blocks(entries: Entries) -> Entries:
    """big_vision models trained with `scan=True` hold all blocks in one array each, stacked on a leading axis."""
    stacked = {key: entry for key, entry in entries.items() if key.startswith(_STACKED)}
    depths = {entry.shape[0] if entry.shape else 0 for entry in stacked.values()}
    if len(depths) > 1 or not all(0 < depth <= _MOST_BLOCKS for depth in depths):
        raise CheckpointError(
            f"The blocks are stacked in arrays of {' and '.join(map(str, sorted(depths)[:4]))} blocks. Expected one "
            f"number from 1 to {_MOST_BLOCKS}."
        )
    result = {key: entry for key, entry in entries.items() if key not in stacked}
    for key, entry in stacked.items():
        shared = _read_once(entry)
        for i in range(entry.shape[0]):
            name = f"Transformer/encoderblock_{i}/{key.removeprefix(_STACKED)}"
            if name in result:
                raise CheckpointError(f"The file holds {name!r} twice, alone and stacked.")
            result[name] = shared.then(operator.itemgetter(i))
    return result


def _read_once(entry: Entry) -> Entry:
    """The entry, whose array stays in memory between two reads that follow each other."""
    kept: list[np.ndarray] = []

    def read():
        if not kept:
            kept.append(entry.read())
        return kept[0]

    return Entry(entry.shape, entry.dtype, read)


def rename_pre_linen(entries: Entries) -> Entries:
    """The released files number the parts of a block through: LayerNorm_0, MultiHeadDotProductAttention_1, LayerNorm_2,
    MlpBlock_3. flax's linen, which the code moved to later, numbers each class by itself; the original loader renames
    with `flax.training.checkpoints.convert_pre_linen`.
    """
    current = {released: name for name, released in _RELEASED_NAMES.items()}
    result: Entries = {}
    for key, entry in entries.items():
        name = _rename_part(key, current)
        if name in result:
            raise CheckpointError(f"The file mixes released and current names: two arrays for {name!r}.")
        result[name] = entry
    return result


def _rename_part(key: str, names: dict[str, str]) -> str:
    return _BLOCK_PART.sub(lambda found: found[1] + names.get(found[2], found[2]) + found[3], key)


def squeeze_group_norms(entries: Entries) -> Entries:
    """Files saved before flax's GroupNorm changed hold its scale and bias as (1, 1, 1, C) (flax issue 1721); the
    original loader squeezes them in `checkpoint._fix_groupnorm`.
    """
    return {
        key: entry.then(lambda array: array.reshape(-1)) if _is_wide_group_norm(key, entry) else entry
        for key, entry in entries.items()
    }


def _is_wide_group_norm(key: str, entry: Entry) -> bool:
    return bool(_GROUP_NORM.fullmatch(key)) and len(entry.shape) == 4 and entry.shape[:3] == (1, 1, 1)


def to_released(entries: Entries) -> Entries:
    """Current names and shapes to those of the released files."""
    return {
        _rename_part(key, _RELEASED_NAMES): entry.then(_widened) if _GROUP_NORM.fullmatch(key) else entry
        for key, entry in entries.items()
    }


def _widened(array: np.ndarray) -> np.ndarray:
    return array[None, None, None]


def raise_positions(entries: Entries) -> Entries:
    """The position table at the top level, as big_vision has it."""
    return {TOP_LEVEL_POSITIONS_KEY if key == POSITIONS_KEY else key: entry for key, entry in entries.items()}
