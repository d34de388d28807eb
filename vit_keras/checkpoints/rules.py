"""The one engine: a format is a table of rules, and a load or an export is that table read in one direction."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from vit_keras.checkpoints.arrays import CheckpointError, Entry
from vit_keras.checkpoints.transforms import SAME, Context, Target, Transform, to_numpy
from vit_keras.layers import Patches, walk


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a format's table.

    Args:
        source: key in the file; `{i}` and other names in braces stand for numbers.
        target: path of the Keras variable, with the same names.
        transform: between the two.
    """

    source: str
    target: str
    transform: Transform = SAME


@dataclasses.dataclass(frozen=True)
class Assignment:
    """An array that will fill a variable."""

    key: str
    entry: Entry
    target: Target
    transform: Transform

    def value(self, context: Context) -> np.ndarray:
        """Read the array and bring it to the variable's shape, or say why it must not be used."""
        if self.entry.dtype.kind in "iub":
            raise CheckpointError(f"{self.key!r} holds {self.entry.dtype}, expected floating-point numbers")
        # Any precision and byte order comes in; float64 stays what it is where the variable can hold it.
        dtype = "float64" if self.target.variable.dtype == "float64" else "float32"
        with np.errstate(over="ignore"):
            array: np.ndarray = self.entry.read().astype(dtype, copy=False)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.key!r} holds values that are not finite in {dtype} (NaN or infinity)")
        value = self.transform.load(array, self.target, context)
        if value.shape != self.target.shape:
            raise CheckpointError(f"{self.key!r} became {value.shape} for {self.target.path} {self.target.shape}")
        return value


def find_backbone(model: keras.Model) -> keras.Model:
    """The model, itself or nested in `model`, that directly holds the `embedding` layer."""
    found = [
        layer
        for layer in walk(model)
        if isinstance(layer, keras.Model) and any(isinstance(child, Patches) for child in layer.layers)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"Expected a model with one Vision Transformer (one `Patches` layer) in it. Received: {model.name!r} with "
            f"{len(found)}"
        )
    return found[0]


def collect_targets(backbone: keras.Model) -> dict[str, Target]:
    """Every variable of a model's layers by path."""
    targets = {}
    for layer in backbone.layers:
        for variable in layer.weights:
            # Layers built inside a user's own scope have more in front.
            inner = variable.path.rpartition(f"{layer.name}/")[2]
            path = f"{layer.name}/{inner}"
            targets[path] = Target(path, variable, layer)
    return targets


def match(
    rules: Iterable[Rule], entries: Mapping[str, Entry], targets: Mapping[str, Target], context: Context
) -> list[Assignment]:
    """Pair every array with the variable it fills.

    Raises:
        CheckpointError: its message has one line for each variable that is never filled (-), array that is never
            claimed (+), and array of a wrong shape (~).
    """
    rules = tuple(rules)
    assignments: dict[str, Assignment] = {}
    problems = []
    for key, entry in entries.items():
        rule, path = _translate(rules, "source", "target", key)
        target = targets.get(path)
        if rule is None or target is None or path in assignments:
            problems.append(f" + {key} {entry.shape}: never claimed")
            continue
        assignments[path] = Assignment(key, entry, target, rule.transform)
        problem = rule.transform.problem(entry.shape, target, context)
        if problem:
            problems.append(f" ~ {key}: wrong shape, {problem}")
    for path in targets.keys() - assignments.keys():
        rule, key = _translate(rules, "target", "source", path)
        needs = (
            f"needs {key} {rule.transform.source_shape(targets[path])}" if rule else "this format has no name for it"
        )
        problems.append(f" - {path}: never filled, {needs}")
    if problems:
        raise CheckpointError("\n".join(sorted(problems, key=_natural)))
    return list(assignments.values())


def export(rules: Iterable[Rule], targets: Mapping[str, Target]) -> dict[str, np.ndarray]:
    """Every variable as an array under its key in the format.

    Raises:
        CheckpointError: the format has no name for some variables; all of them are listed.
    """
    rules = tuple(rules)
    arrays, nameless = {}, []
    for path, target in targets.items():
        rule, key = _translate(rules, "target", "source", path)
        if rule is None:
            nameless.append(f" - {path} {target.shape}")
        else:
            arrays[key] = rule.transform.export(to_numpy(target.variable), target)
    if nameless:
        raise CheckpointError("This format has no name for\n" + "\n".join(sorted(nameless, key=_natural)))
    return arrays


def apply(assignments: list[Assignment], context: Context, rollback: bool) -> None:
    """Fill the variables; with `rollback`, an array that can no longer be read leaves all of them as they were.

    Raises:
        CheckpointError: a read failed, although it went well when everything was checked.
    """
    before: list[tuple[Target, np.ndarray]] = []
    try:
        for assignment in assignments:
            value = assignment.value(context)
            if rollback:
                before.append((assignment.target, np.array(to_numpy(assignment.target.variable))))
            assignment.target.variable.assign(value)
    except BaseException as error:  # an interruption too
        for target, old in before:
            target.variable.assign(old)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f" ~ the file changed or failed while it was read ({error})") from error


def has_name(rules: Iterable[Rule], path: str) -> bool:
    """Whether a format has a name for the variable at `path`."""
    return _translate(tuple(rules), "target", "source", path)[0] is not None


def _translate(rules: tuple[Rule, ...], side: str, other: str, name: str) -> tuple[Rule | None, str]:
    """The rule whose `side` matches `name`, and the name on the `other` side."""
    for rule in rules:
        found = _pattern(getattr(rule, side)).fullmatch(name)
        if found:
            return rule, getattr(rule, other).format(**found.groupdict())
    return None, ""


@functools.cache
def _pattern(text: str) -> re.Pattern:
    escaped = re.escape(text).replace(r"\{", "{").replace(r"\}", "}")
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>\\d+)", escaped))


def _natural(line: str) -> list:
    """Sort key that puts block 2 before block 10."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", line)]
