"""`vit-keras predict`: labels for image files."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from vit_keras.predictor import Prediction, Predictor
from vit_keras.preprocessing import ImageError


def run(
    images: tuple[str, ...],
    weights: str,
    labels: str | None,
    top: int,
    image_size: tuple[int, int] | None,
    batch_size: int,
    as_json: bool,
) -> int:
    """Print the predictions of each image; return the exit code, 1 if one of them could not be read.

    Raises:
        ValueError: the weights or labels cannot be used.
    """
    predictor = Predictor(weights, read_labels(labels), image_size or None)
    show = _show_json if as_json else _show_text
    unreadable: list[str] = []
    readable: list[str] = []

    def pixels() -> Iterator:
        for path in images:
            try:
                prepared = predictor.prepare(path)
            except ImageError as error:
                unreadable.append(path)
                print(f"vit-keras: {error}", file=sys.stderr)
                continue
            readable.append(path)
            yield prepared

    for index, predictions in enumerate(predictor.stream_prepared(pixels(), top, batch_size)):
        show(readable[index], predictions)
    return int(bool(unreadable))


def read_labels(path: str | None) -> list[str] | None:
    """Class names from a text file, one a line.

    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        labels = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the labels cannot be read ({error}).") from error
    blank = [number for number, label in enumerate(labels, 1) if not label.strip()]
    if blank:
        raise ValueError(f"{path}: expected a class name on each line. Received: line {blank[0]} is blank.")
    return labels


def _show_json(path: str, predictions: list[Prediction]) -> None:
    print(json.dumps({"image": path, "predictions": [dataclasses.asdict(prediction) for prediction in predictions]}))


def _show_text(path: str, predictions: list[Prediction]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(path, style="bold")
    for prediction in predictions:
        console.print(f"  {prediction.probability:7.2%}  {prediction.label}")
