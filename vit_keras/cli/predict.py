"""`vit-keras predict`: labels for image files."""

import contextlib
import csv
import dataclasses
import glob
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from PIL import Image

from vit_keras import catalog, registry
from vit_keras import labels as label_sets
from vit_keras.checkpoints import CacheEntry, DownloadError
from vit_keras.predictor import Prediction, Predictor, ahead
from vit_keras.preprocessing import ImageError
from vit_keras.progress import progress_bar

DEFAULT = "vit_s16.augreg_in21k_ft_in1k_224"
OFFLINE = "vit_mini"
NO_PIXELS = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}  # formats that Pillow knows but cannot read by itself


def run(
    images: tuple[str, ...],
    model: str | None,
    weights: str | None,
    labels: str | None,
    top: int,
    image_size: tuple[int, int] | None,
    batch_size: int,
    output: str,
) -> int:
    """Print the predictions of each image; return the exit code, 1 if one of them could not be read.

    Raises:
        ValueError: the model or labels cannot be used.
    """
    if model is not None and weights is not None:
        raise ValueError(f"--model names a published model, --weights a file: pass one of them. Received: {model} too")
    if "" in (model, weights, labels):
        raise ValueError("--model, --weights and --labels need a value. Received: an empty one")
    paths = find_images(images)
    names = None if labels is None else label_sets.read(labels)
    try:
        name = DEFAULT if model is None else model
        if weights is None:
            announce(name)
        predictor = Predictor(name if weights is None else weights, names, image_size or None)
    except DownloadError as error:
        print(
            f"vit-keras: {error} A small model of ten kinds of clothes needs no network: --model {OFFLINE}.",
            file=sys.stderr,
        )
        return 1
    failures = [path for path, message in paths if message]
    for path, message in paths:
        if message:
            print(f"vit-keras: {path}: {message}", file=sys.stderr)
    good = [path for path, message in paths if not message]
    show = {"text": _text, "json": _json, "csv": _csv}[output]()
    bar = progress_bar("Images", len(good)) if len(good) > 1 else contextlib.nullcontext(lambda count: None)
    with bar as advance:
        for path, found in predict(predictor, good, top, batch_size):
            if isinstance(found, ImageError):
                failures.append(path)
                print(f"vit-keras: {found}", file=sys.stderr)
            else:
                show(path, found)
            advance(1)
    return int(bool(failures))


def find_images(arguments: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """The files that paths, folders (with their subfolders) and patterns mean, or what is wrong with an argument."""
    found: list[tuple[str, str | None]] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            inside = _inside(path)
            found += [(file, None) for file in inside] or [(argument, "there are no images in this folder.")]
        elif not path.exists() and glob.has_magic(argument):
            matching = sorted(glob.glob(argument, recursive=True))
            files = [file for match in matching for file in (_inside(Path(match)) if os.path.isdir(match) else [match])]
            found += [(file, None) for file in dict.fromkeys(files)] or [(argument, "no file matches.")]
        else:
            found.append((argument, None))
    return found


def _inside(folder: Path) -> list[str]:
    """The image files in a folder and its subfolders, by their endings; hidden ones are left out."""
    kinds = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN.keys() - NO_PIXELS}
    return sorted(
        str(file)
        for file in folder.rglob("*")
        if file.suffix.lower() in kinds and not file.name.startswith(".") and file.is_file()
    )


def announce(name: str) -> None:
    """Say on standard error what will be fetched and how big it is, if it is not there yet."""
    variant, _, tag = name.partition(".")
    if variant not in registry.VARIANTS:
        return  # the predictor will say so
    row = catalog.find(variant, tag or registry.VARIANTS[variant].weights)
    if row.embedded or CacheEntry.of(row.url).path.exists():
        return
    width, classes = registry.spec_of(variant).width, row.classes or 0
    size = row.size or 4 * (registry.PARAMETERS[variant] + (classes - 1000) * (width + 1))
    print(f"Fetching {row.name}, about {size / 2**20:,.0f} MiB, from {row.url}", file=sys.stderr)


def predict(predictor: Predictor, paths: list[str], top: int, batch_size: int) -> Iterator[tuple[str, Any]]:
    """Each path with its predictions, or with the `ImageError` that it gave."""

    def prepare(path: str) -> Any:
        try:
            return predictor.prepare(path)
        except ImageError as error:
            return error

    prepared = ahead(prepare, paths, 2 * batch_size)
    waiting: list[tuple[str, ImageError | None]] = []

    def readable() -> Iterator:
        for path, result in zip(paths, prepared):
            waiting.append((path, result if isinstance(result, ImageError) else None))
            if waiting[-1][1] is None:
                yield result

    for predictions in predictor.stream_prepared(readable(), top, batch_size):
        while waiting[0][1] is not None:
            yield waiting.pop(0)
        yield waiting.pop(0)[0], predictions
    yield from waiting


Show = Callable[[str, list[Prediction]], None]


def _json() -> Show:
    def show(path: str, predictions: list[Prediction]) -> None:
        found = [dataclasses.asdict(prediction) for prediction in predictions]
        print(json.dumps({"image": path, "predictions": found}))

    return show


def _csv() -> Show:
    def line(values: Iterable[Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(values)
        return text.getvalue()

    # print, and not a writer on sys.stdout: a progress bar changes what that is.
    print(line(["image", "rank", *(field.name for field in dataclasses.fields(Prediction))]))

    def show(path: str, predictions: list[Prediction]) -> None:
        for rank, prediction in enumerate(predictions, 1):
            print(line([path, rank, *dataclasses.astuple(prediction)]))

    return show


def _text() -> Show:
    def show(path: str, predictions: list[Prediction]) -> None:
        click.echo(click.style(path, bold=True))
        for prediction in predictions:
            click.echo(f"  {prediction.probability:7.2%}  {prediction.label}")

    return show
