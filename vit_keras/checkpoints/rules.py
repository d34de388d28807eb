"""The one engine: a format is a table of rules, and a load or an export is that table read in one direction."""

import contextlib
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
        source: key in the file; `{i}` and other names in braces stand for numbers, `{i+1}` for one more.
        target: path of the Keras variable, with the same names.
        transform: between the two. Rules with one source and several targets take its parts.
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
    """Pair every array with the variable, or the variables, that it fills.

    Raises:
        CheckpointError: its message has one line for each variable that is never filled (-), array that is never
            claimed (+), and array of a wrong shape (~).
    """
    rules = tuple(rules)
    assignments: dict[str, Assignment] = {}
    problems = set()
    for key, entry in entries.items():
        found = translate(rules, "source", key)
        if not found or any(path not in targets or path in assignments for _, path in found):
            problems.add(f" + {key} {entry.shape}: never claimed")
            continue
        for rule, path in found:
            assignments[path] = Assignment(key, entry, targets[path], rule.transform)
            problem = rule.transform.problem(entry.shape, targets[path], context)
            if problem:
                problems.add(f" ~ {key}: wrong shape, {problem}")
    for path in targets.keys() - assignments.keys():
        found = translate(rules, "target", path)
        needs = "this format has no name for it"
        if found:
            rule, key = found[0]
            needs = f"needs {key} {rule.transform.source_shape(targets[path])}"
        problems.add(f" - {path}: never filled, {needs}")
    if problems:
        raise CheckpointError("\n".join(sorted(problems, key=_natural)))
    return list(assignments.values())


def shapes_of(rules: Iterable[Rule], entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]]:
    """Shapes, as a model has them, of the variables that entries fill; those that fit no rule are left out."""
    rules = tuple(rules)
    shapes = {}
    for key, entry in entries.items():
        for rule, path in translate(rules, "source", key):
            with contextlib.suppress(CheckpointError):
                shapes[path] = rule.transform.shape(entry.shape)
    return shapes


def export(rules: Iterable[Rule], targets: Mapping[str, Target]) -> dict[str, Entry]:
    """Every variable, still unread, as an array under its key in the format.

    Raises:
        CheckpointError: the format has no name for some variables; all of them are listed.
    """
    rules = tuple(rules)
    parts: dict[str, dict[int, Entry]] = {}
    problems = []
    for path, target in targets.items():
        found = translate(rules, "target", path)
        if not found:
            problems.append(f" - {path} {target.shape}")
            continue
        rule, key = found[0]
        parts.setdefault(key, {})[rule.transform.part[0]] = _exported(rule.transform, target)
    if problems:
        raise CheckpointError("This format has no name for\n" + "\n".join(sorted(problems, key=_natural)))
    return {key: _joined([entries[index] for index in sorted(entries)]) for key, entries in parts.items()}


def _exported(transform: Transform, target: Target) -> Entry:
    dtype = np.dtype(keras.backend.standardize_dtype(target.variable.dtype))
    value = Entry(target.shape, dtype, lambda: to_numpy(target.variable))
    return value.then(lambda array: transform.back(array, target))


def _joined(entries: list[Entry]) -> Entry:
    """Entries joined along their first axis."""
    if len(entries) == 1:
        return entries[0]
    shape = (sum(entry.shape[0] for entry in entries), *entries[0].shape[1:])
    return Entry(shape, entries[0].dtype, lambda: np.concatenate([entry.read() for entry in entries]))


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


def translate(rules: tuple[Rule, ...], side: str, name: str) -> list[tuple[Rule, str]]:
    """The rules whose `side` ("source" or "target") is `name`, each with the name on the other side."""
    found = []
    for rule in rules:
        here, there = (rule.source, rule.target) if side == "source" else (rule.target, rule.source)
        numbers = _numbers(here, name)
        if numbers is not None:
            found.append((rule, _filled(there, numbers)))
    return found


_PLACE = re.compile(r"\{(\w+)(\+1)?\}")


def _filled(pattern: str, numbers: dict[str, int]) -> str:
    return _PLACE.sub(lambda place: str(numbers[place[1]] + int(place[2] or 0)), pattern)


def _numbers(pattern: str, name: str) -> dict[str, int] | None:
    """The numbers that stand in `name` for the places of a pattern; None if it is another name."""
    found = _compiled(pattern).fullmatch(name)
    if found is None:
        return None
    places = {place: 1 if plus else 0 for place, plus in _PLACE.findall(pattern)}
    numbers = {place: int(found[place]) - offset for place, offset in places.items()}
    return None if any(number < 0 for number in numbers.values()) else numbers


@functools.cache
def _compiled(pattern: str) -> re.Pattern:
    parts = _PLACE.split(pattern)  # text, name, "+1" or None, text, …
    # No leading zeros: every name has one spelling.
    places = [f"(?P<{name}>0|[1-9]\\d{{0,8}})" for name in parts[1::3]]
    texts = [re.escape(text) for text in parts[::3]]
    return re.compile("".join(text + place for text, place in zip(texts, [*places, ""])))


def _natural(line: str) -> list:
    """Sort key that puts block 2 before block 10."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", line)]
