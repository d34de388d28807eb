"""Rules that the formats of PyTorch share: names of its layers, orders of its axes."""

import re
from collections.abc import Callable

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.eras import Entries
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import SAME, TRANSPOSED, Transform, part

BLOCK = "Transformer_encoderblock_{i}"


def linear(source: str, target: str, kernel: Transform = TRANSPOSED) -> tuple[Rule, Rule]:
    return Rule(f"{source}.weight", f"{target}/kernel", kernel), Rule(f"{source}.bias", f"{target}/bias")


def joined(source: str, targets: tuple[str, ...]) -> tuple[Rule, ...]:
    """Linear layers that PyTorch code joins into one, such as `qkv`."""
    count = len(targets)
    return tuple(
        rule
        for index, target in enumerate(targets)
        for rule in (
            Rule(f"{source}.weight", f"{target}/kernel", part(TRANSPOSED, index, count)),
            Rule(f"{source}.bias", f"{target}/bias", part(SAME, index, count)),
        )
    )


def norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}.weight", f"{target}/gamma"), Rule(f"{source}.bias", f"{target}/beta")


def renamed(
    entries: Entries, inside: Callable[[str], str], beside: re.Pattern, names: tuple[tuple[re.Pattern, str], ...]
) -> tuple[Entries, tuple[str, ...]]:
    """Entries under the names of a table.

    Args:
        entries: key → entry.
        inside: key → what it is called inside the encoder.
        beside: names of what is no part of the encoder.
        names: (pattern of a whole name, name in the table), applied in order.

    Returns:
        The entries, and the keys of those beside the encoder.

    Raises:
        CheckpointError: two keys come to one name.
    """
    result: Entries = {}
    left_out = []
    for key, entry in entries.items():
        name = inside(key)
        if beside.fullmatch(name):
            left_out.append(key)
            continue
        for old, new in names:
            name = old.sub(new, name) if old.fullmatch(name) else name
        if name in result:
            raise CheckpointError(f"The file holds {name!r} twice, under two names.")
        result[name] = entry
    return result, tuple(left_out)
