"""Names of classes, in the order of the weights' heads. Imports no Keras.

ImageNet: synset order of google-research's weights with WordNet's lemmas, as timm 1.0.31 ships them (`data/_info`);
CIFAR-10 and -100, Oxford-IIIT Pets, RESISC45: the order of TensorFlow Datasets.
"""

import functools
from importlib import resources
from pathlib import Path

_FILES = resources.files("vit_keras") / "assets" / "labels"
ASSUMED = {1000: "imagenet1k", 21843: "imagenet21k"}


def names() -> list[str]:
    """Names of the label sets."""
    return sorted(file.name.removesuffix(".txt") for file in _FILES.iterdir() if file.name.endswith(".txt"))


def load(name: str) -> list[str]:
    """The class names of a label set, such as `"imagenet1k"`, index by index.

    Raises:
        ValueError: there is no such set.
    """
    return list(_load(name))


@functools.cache
def _load(name: str) -> tuple[str, ...]:
    if name not in names():
        raise ValueError(f"There is no label set {name!r}. Expected one of {', '.join(names())}.")
    return tuple((_FILES / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def known(classes: list[str]) -> str | tuple[str, ...] | None:
    """Class names as a record holds them: the name of the label set that they are, in this order, or themselves.

    None if there are none, or none but placeholders such as Hugging Face's `LABEL_0`.
    """
    if all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        return None
    return next((name for name in names() if _load(name) == tuple(classes)), tuple(classes))


def of(record: str | tuple[str, ...] | None, classes: int | None) -> list[str] | None:
    """The names of so many classes that a record says, or None."""
    found = load(record) if isinstance(record, str) else list(record or ())
    return found if found and len(found) == classes else None


def read(source: str) -> list[str]:
    """Class names of a label set by its name, or from a text file with a name on each line.

    Raises:
        ValueError: the source is neither, or the file cannot be read or has a blank line.
    """
    if source in names() and not Path(source).exists():
        return load(source)
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{source}: the labels cannot be read ({error}). Expected a text file, or one of {', '.join(names())}."
        ) from error
    blank = [number for number, label in enumerate(lines, 1) if not label.strip()]
    if blank:
        raise ValueError(f"{source}: expected a class name on each line. Received: line {blank[0]} is blank.")
    return lines
