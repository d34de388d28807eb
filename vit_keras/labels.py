"""Names of classes, in the order of the weights' heads. Imports no Keras.

ImageNet: synset order of google-research's weights with WordNet's lemmas, as timm 1.0.31 ships them (`data/_info`);
CIFAR-10 and -100, Oxford-IIIT Pets, RESISC45: the order of TensorFlow Datasets.
"""

import functools
from importlib import resources

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
