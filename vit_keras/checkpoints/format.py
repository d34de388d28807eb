"""What a foreign format is: a table of rules, the numerics of its code, how it is recognised, what it cannot say."""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.eras import Entries
from vit_keras.checkpoints.facts import Facts
from vit_keras.checkpoints.kinds import write_safetensors
from vit_keras.checkpoints.rules import Rule
from vit_keras.checks import as_pair
from vit_keras.records import Numerics, Preprocessing, Resize, Weights
from vit_keras.spec import Stem


def _as_they_are(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    return entries, ()


def _save_safetensors(folder: str, entries: Entries) -> None:
    write_safetensors(os.path.join(folder, "model.safetensors"), entries, {"format": "pt"})


def _nothing_known(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Written:
    """A model in a foreign format, not yet on disk.

    Args:
        entries: key → array, still unread.
        files: name → JSON content of the files beside them.
    """

    entries: Entries
    files: dict[str, Any]


class PrefixRows(NamedTuple):
    """Numbers of rows that may stand before the grid of a position table; the unusual ones are asked about."""

    usual: tuple[int, ...]
    unusual: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Format:
    """One foreign format. Adding one is one file in `maps/` with a table and this record of it.

    Args:
        name: in the record of the weights.
        family: as `--from` and `--to` have it; several formats may be of one.
        title: for messages.
        rules: the table.
        numerics: of the code that the weights come from, unless their configuration says otherwise.
        resize: its rule for position tables of other grids.
        preprocessing: what its weights expect of pixels, unless their configuration says otherwise.
        recognises: whether these keys are its own.
        canonical: (entries of any era of the format, configuration) → (entries under the keys of the table, keys left
            out).
        prefix_rows: keys of the table → how many rows may stand before the grid of the position table.
        known: (configuration, keys as they are in the file) → what these decide: fields of `Checkpoint`, the
            `num_heads` and `pooling` of `Facts`, `image_size`, (height, width) in pixels, and `shapes`, fields of
            `Facts` that the arrays must have.
        heads: entries as they are in the file → number of attention heads, where they tell it.
        refuse: (facts, numerics) → why the format cannot express a model, one sentence each. The word "numerics"
            begins those that `accept_numerics` lets pass.
        write: (entries under the keys of the table, facts, record) → what goes on disk.
        save_arrays: (folder, entries) writes them there. Default: into `model.safetensors`.
    """

    name: str
    family: str
    title: str
    rules: tuple[Rule, ...]
    numerics: Numerics
    resize: Resize
    preprocessing: Preprocessing
    recognises: Callable[[Collection[str]], bool]
    canonical: Callable[[Entries, Mapping[str, Any]], tuple[Entries, tuple[str, ...]]] = _as_they_are
    prefix_rows: Callable[[Collection[str]], PrefixRows] = lambda keys: PrefixRows((1,))
    known: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]] = _nothing_known
    heads: Callable[[Entries], int | None] = lambda entries: None
    refuse: Callable[[Facts, Numerics], list[str]] | None = None
    write: Callable[[Entries, Facts, Weights], Written] | None = None
    save_arrays: Callable[[str, Entries], None] = _save_safetensors


def numerics_reasons(ours: Numerics, theirs: Numerics, who: str, stem: Stem | None = None) -> list[str]:
    """What of our numerics the code `who` would not compute; a stem's count only with one.

    Returns:
        Sentences that begin with "numerics".
    """
    reasons = []
    if ours.gelu != theirs.gelu:
        reasons.append(
            f"numerics: {who} computes GELU in its {theirs.gelu} form, these weights need the {ours.gelu} one"
        )
    if not math.isclose(ours.epsilon, theirs.epsilon, rel_tol=1e-6):
        reasons.append(
            f"numerics: {who} has a LayerNorm epsilon of {theirs.epsilon}, these weights need {ours.epsilon}"
        )
    if stem is not None and ours.of_stem() != theirs.of_stem():
        reasons.append(
            f"numerics: {who} computes a ResNet stem with {theirs.of_stem()}, these weights need {ours.of_stem()}"
        )
    return reasons


def config_part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A JSON object inside a configuration; empty when it is missing.

    Raises:
        CheckpointError: it is something else.
    """
    part = config.get(name) or {}
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json: expected {name!r} to be an object. Received: {type(part).__name__}")
    return part


def config_pair(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """A size in a configuration, a number or a pair of them, as (height, width); None when it is missing.

    Raises:
        CheckpointError: it is something else.
    """
    if config.get(name) is None:
        return None
    try:
        value = config[name]
        return as_pair(tuple(value) if isinstance(value, list) else value, name)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def config_number(config: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    """A positive number in a configuration.

    Raises:
        CheckpointError: it is something else.
    """
    value = config.get(name, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise CheckpointError(f"config.json: expected {name!r} to be a positive number. Received: {value!r}")
    return value


def config_choice(config: Mapping[str, Any], name: str, choices: Collection[str], default: str | None = None) -> Any:
    """One of several words in a configuration.

    Raises:
        CheckpointError: it is another.
    """
    value = config.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(f"config.json: expected {name!r} to be one of {', '.join(choices)}. Received: {value!r}")
    return value
