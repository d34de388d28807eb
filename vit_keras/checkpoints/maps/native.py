"""Models of this library as a source: their own variables, under their own names.

So what can be changed while a file is loaded (image size, patch size, classes, channels) can be changed of a model.
"""

from collections.abc import Collection

import keras
import numpy as np

from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import Entry
from vit_keras.checkpoints.facts import POSITIONS
from vit_keras.checkpoints.format import Format
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL, SAME, Target, to_numpy
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.records import ALIGN_CORNERS, ORIGINAL, Numerics

ADAPTED = {"embedding/kernel": FIRST_KERNEL, "conv_root/kernel": FIRST_KERNEL, POSITIONS: TABLE}


def recognises(keys: Collection[str]) -> bool:
    """Never: a model says what it is."""
    return False


def format_of(backbone: keras.Model) -> Format:
    """The format whose table names each variable of a model after itself."""
    targets = rules.collect_targets(backbone)
    return Format(
        name="keras",
        family="keras",
        title="a Keras model of this library",
        rules=tuple(Rule(path, path, ADAPTED.get(path, SAME)) for path in targets),
        numerics=Numerics(),
        resize=ALIGN_CORNERS,
        preprocessing=ORIGINAL,
        recognises=recognises,
    )


def entries_of(backbone: keras.Model) -> dict[str, Entry]:
    """Path → lazy value of every variable."""
    targets = rules.collect_targets(backbone)
    return {path: _entry(target) for path, target in targets.items()}


def _entry(target: Target) -> Entry:
    dtype = keras.backend.standardize_dtype(target.variable.dtype)
    return Entry(target.shape, np.dtype(dtype), lambda: to_numpy(target.variable))
