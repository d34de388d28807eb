"""One checkpoint from any format into any other, with what may change on the way."""

import dataclasses
import inspect
import json
import os
import time
import zipfile
from typing import Any

import keras

from vit_keras import catalog, checkpoints, registry
from vit_keras.checkpoints.arrays import replacing
from vit_keras.checkpoints.export import check_place, replacing_folder
from vit_keras.checkpoints.maps import FORMATS
from vit_keras.checks import as_choice
from vit_keras.variants import open_row

FAMILIES = {
    "npz" if known.family == "original" else known.family: known.family for known in FORMATS if known.write is not None
}
TARGETS = ("keras", "weights", *FAMILIES, "savedmodel")
SUFFIXES = {"keras": ".keras", "weights": ".weights.h5", "npz": ".npz"}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        source, out: path or name, and path.
        to: one of `TARGETS`.
        model: the Keras model between.
        checkpoint: the source, opened.
        report: of loading it into the model.
        written: path of each variable → key in the target; empty where Keras wrote it.
    """

    source: str
    out: str
    to: str
    model: keras.Model
    checkpoint: checkpoints.Checkpoint
    report: checkpoints.LoadReport
    written: dict[str, str]

    def explain(self) -> str:
        """Line by line, what went where."""
        lines = [f"{key} → {path}{self._further(path)}" for path, key in self.report.loaded.items()]
        lines += [f"(new) → {path}{self._further(path)}" for path in self.report.kept]
        lines += [f"{key} → (left out)" for key in self.report.dropped]
        return "\n".join([*lines, *self.report.changes()])

    def _further(self, path: str) -> str:
        return f" → {self.written[path]}" if path in self.written else ""


def convert(
    source: str | os.PathLike,
    to: str,
    out: str | os.PathLike,
    *,
    format: str | None = None,
    accept_numerics: bool = False,
    force: bool = False,
    **options: Any,
) -> Conversion:
    """Convert a checkpoint.

    ```python
    convert("ViT-B_16.npz", "keras", "b16_384.keras", image_size=384)
    convert("fine_tuned.keras", "huggingface", "my-vit")
    ```

    Args:
        source: whatever `vit_keras.from_checkpoint` reads, or a `variant.tag` of the catalog.
        to: `"keras"` (a whole model, `.keras`), `"weights"` (`.weights.h5`), `"npz"` (the original layout), `"timm"`,
            `"huggingface"`, `"keras_hub"` (folders that these libraries load), or `"savedmodel"` (TensorFlow's).
        out: path of the file or folder.
        format: of the source; None (default) recognises it.
        accept_numerics: whether a target may compute GELU or norms otherwise than the weights were trained with.
        force: whether what is at `out` is replaced. Default False.
        **options: changes: `image_size`, `patch_size`, `classes`, `in_channels`, `num_heads`, `source_grid`, `resize`
            and others of `vit_keras.from_checkpoint`.

    Returns:
        A `Conversion`. Its `model` is at hand for further use.

    Raises:
        ValueError: an argument is wrong.
        CheckpointError: the source cannot be read, or the target cannot express it. Nothing was written.
    """
    as_choice(to, "to", TARGETS)
    out = os.fspath(out)
    suffix = SUFFIXES.get(to, "")
    if not out.endswith(suffix) or (to == "keras" and not os.path.basename(out).removesuffix(suffix)):
        raise ValueError(f"The name of a file for {to!r} ends in {suffix}. Received: {out}")
    check_place(out, force, is_file=bool(suffix))
    checkpoint = open_source(source, format, options.get("source_grid"))
    model, report = registry.build_and_load(checkpoint, **options)
    written = _write(model, to, out, accept_numerics)
    return Conversion(os.fspath(source), out, to, model, checkpoint, report, written)


def open_source(source: str | os.PathLike, format: str | None, source_grid: Any = None) -> checkpoints.Checkpoint:
    """Open what a conversion starts from: a row of the catalog, or any checkpoint.

    Raises:
        CheckpointError: it cannot be read, or fetched.
    """
    name = os.fspath(source)
    if name in catalog.ROWS:
        return open_row(catalog.ROWS[name])
    return checkpoints.open_checkpoint(name, format, source_grid)


def _write(model: keras.Model, to: str, out: str, accept_numerics: bool) -> dict[str, str]:
    """Write the model; path of each variable → key in what was written, where that is a table's."""
    if to in FAMILIES:
        return checkpoints.save_checkpoint(model, out, FAMILIES[to], accept_numerics=accept_numerics, force=True)
    if to == "savedmodel":
        with replacing_folder(out) as folder:
            quiet = {"verbose": False} if "verbose" in inspect.signature(model.export).parameters else {}  # not in 3.3
            model.export(folder, **quiet)
    else:
        with replacing(out) as temporary:
            _save_keras(model, temporary) if to == "keras" else model.save_weights(temporary)
    return {}


def _save_keras(model: keras.Model, path: str) -> None:
    """`model.save(path)`, the weights written to the disk first: Keras holds a second copy of them in memory."""
    weights = f"{path}.weights.h5"
    metadata = {"keras_version": keras.version(), "date_saved": time.strftime("%Y-%m-%d@%H:%M:%S")}
    try:
        model.save_weights(weights)
        with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
            archive.writestr("metadata.json", json.dumps(metadata))
            archive.writestr("config.json", json.dumps(keras.saving.serialize_keras_object(model)))
            archive.write(weights, "model.weights.h5")
    finally:
        if os.path.exists(weights):
            os.unlink(weights)
