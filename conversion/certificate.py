"""The proof of a conversion: a Keras model against the NumPy reference, as JSON.

The reference reads the arrays by itself, so that a mistake in the library's tables shows: those of the source and, of a
target that it can read, those of the target too. What no array tells (number of heads, GELU, epsilon, pooling, rule for
positions) is taken from what the library knows of the file, and written down.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import keras

from conversion import judging, reference
from vit_keras import checkpoints, converter, registry
from vit_keras.checkpoints.arrays import CheckpointError, replacing
from vit_keras.checkpoints.cache import digest

TOLERANCE = 2e-5  # of the largest value of a stage; float32 against float64 is below 5e-6 in models of 12 blocks


def certify(
    source: str,
    target: str | None = None,
    *,
    format: str | None = None,
    tolerance: float = TOLERANCE,
    accept_numerics: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Run the Keras model of a checkpoint and the reference on the same images, and compare every stage.

    Args:
        source: path of a checkpoint of another library, which the reference reads; or a `.keras` model of this one,
            which goes with a `target` that the reference reads.
        target: what it was converted to, and what is judged: a `.keras` or `.weights.h5` file, a SavedModel, or
            anything that `vit_keras.from_checkpoint` reads. None (default) judges the model that the source gives.
        format: of the source; None (default) recognises it.
        tolerance: of the verdict: the largest difference of any stage, as a share of the stage's largest value.
        accept_numerics: whether a target whose library computes GELU or norms otherwise may pass. It is judged by those
            numerics, and `numerics_difference` holds what they cost. Default False.
        **options: of `vit_keras.from_checkpoint`, such as `image_size`. They must be those of the conversion.

    Returns:
        The certificate, plain JSON: digests, versions, settings, differences per stage, verdict.

    Raises:
        CheckpointError, ValueError: the source or the target cannot be read, or an option cannot be followed.
    """
    judging.check_options(options)
    checkpoint = converter.open_source(source, format, options.get("source_grid"))
    own = checkpoint.format.name == checkpoints.source.KERAS
    if own and not judging.is_foreign(target):
        raise CheckpointError(
            f"{source} is a model of this library, which the reference does not read: pass a target in the layout of "
            f"another library or an .npz. Received: {target}"
        )
    prove = _of_own if own else _of_foreign
    proof = prove(source, checkpoint, target, options)
    return _document(source, checkpoint, target, options, tolerance, accept_numerics, proof, format)


@dataclasses.dataclass
class _Proof:
    """What was compared.

    Args:
        settings: of the reference, with the numerics of the model that was judged.
        images: shape of the images.
        stages, problems: of the judged model against the reference.
        numerics_difference: stages with the numerics of the judged model against those of the other side; empty when
            they are the same.
        target_stages: of the reference on the target's arrays against that on the source's; empty where it cannot
            read the target.
    """

    settings: reference.Settings
    images: tuple[int, ...]
    stages: dict[str, dict[str, float]]
    problems: list[str]
    numerics_difference: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    target_stages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def _of_foreign(source: str, checkpoint: checkpoints.Checkpoint, target: str | None, options: dict[str, Any]) -> _Proof:
    """The model of the target, or of the source, against the reference on the source's arrays."""

    def build() -> keras.Model:
        return registry.build_and_load(checkpoint, **options)[0]

    told, classes = judging.settings_of(checkpoint, options), checkpoint.facts.classes
    grid = judging.grid_of(checkpoint, options) if target is not None and target.endswith(".npz") else None
    judged = judging.at_full_precision(build() if target is None else judging.target_model(target, build, grid))
    images = judging.inputs_of(judged, options)
    settings = _with_numerics(told, checkpoints.checkpoint_of(judged))
    expected = judging.reference_stages(source, settings, images, options, classes)
    found = judging.keras_stages(judged, images)
    if target is not None and judging.is_saved_model(target):
        final = "logits" if "logits" in found else "features"
        found["served"], expected["served"] = judging.serve(target, images), found[final]
    proof = _Proof(settings, images.shape, *judging.compare(found, expected))
    if settings != told:
        wanted = judging.reference_stages(source, told, images, options, classes)
        proof.numerics_difference = judging.compare(expected, wanted)[0]
    if judging.is_foreign(target):
        theirs = converter.open_source(target, None, grid)
        said = judging.settings_of(theirs, _not_said(theirs, checkpoint, options))
        read = judging.reference_stages(target, said, images, {}, theirs.facts.classes)
        proof.target_stages, problems = judging.compare(read, expected)
        proof.problems += [f"target: {problem}" for problem in problems]
    return proof


def _of_own(source: str, checkpoint: checkpoints.Checkpoint, target: str, options: dict[str, Any]) -> _Proof:
    """The model of a `.keras` source against the reference on the target's arrays."""
    model = registry.build_and_load(checkpoint, **{**options, "dtype": "float32"})[0]
    images = judging.inputs_of(model, options)
    theirs = converter.open_source(target, None, judging.grid_of(checkpoint, options))
    said = judging.settings_of(theirs, _not_said(theirs, checkpoint, options))
    settings = _with_numerics(said, checkpoint)
    expected = judging.reference_stages(target, settings, images, {}, theirs.facts.classes)
    proof = _Proof(settings, images.shape, *judging.compare(judging.keras_stages(model, images), expected))
    if said != settings:
        computed = judging.reference_stages(target, said, images, {}, theirs.facts.classes)
        proof.numerics_difference = judging.compare(computed, expected)[0]
    return proof


def _not_said(
    target: checkpoints.Checkpoint, source: checkpoints.Checkpoint, options: dict[str, Any]
) -> dict[str, Any]:
    """What a target's files do not tell and its source does."""
    told = {"num_heads": target.facts.num_heads or judging.settings_of(source, options).num_heads}
    return told if target.says_pooling else {**told, "pooling": options.get("pooling", source.facts.pooling)}


def _with_numerics(settings: reference.Settings, checkpoint: checkpoints.Checkpoint) -> reference.Settings:
    """With those of another; a stem's only where there is one."""
    numerics = checkpoint.numerics
    fields = vars(numerics) if checkpoint.facts.stem else {"gelu": numerics.gelu, "epsilon": numerics.epsilon}
    return dataclasses.replace(settings, **fields)


def _document(source, checkpoint, target, options, tolerance, accept_numerics, proof: _Proof, format) -> dict[str, Any]:
    problems = list(proof.problems)
    for name, stage in {**proof.stages, **{f"target: {k}": v for k, v in proof.target_stages.items()}}.items():
        if not stage["relative"] <= tolerance:
            problems.append(f"{name}: {stage['relative']:.1e} of the largest value, more than {tolerance:.0e}")
    if proof.numerics_difference and not accept_numerics:
        problems.append("numerics: the target computes otherwise than the weights were trained with")
    return {
        "source": _file(source) | {"format": checkpoint.format.name},
        "target": None if target is None else _file(target),
        "options": options | {"accept_numerics": accept_numerics} | ({"format": format} if format else {}),
        "images": {"shape": list(proof.images), "generator": "conversion.judging.inputs"},
        "settings": vars(proof.settings),
        "stages": proof.stages,
        "numerics_difference": proof.numerics_difference,
        "target_read_by_reference": proof.target_stages,
        "tolerance": tolerance,
        "verdict": "fail" if problems else "pass",
        "problems": problems,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _file(path: str) -> dict[str, Any]:
    return {"name": os.path.basename(path.rstrip("/")), "sha256": digests(path)}


def digests(path: str) -> dict[str, str]:
    """sha256 of a file, or of every file below a folder, by name."""
    if os.path.isfile(path):
        return {os.path.basename(path): digest(Path(path))}
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            inside = os.path.relpath(os.path.join(folder, name), path)
            found |= {inside: digests(os.path.join(folder, name))[name]}
    return dict(sorted(found.items()))


def versions() -> dict[str, str]:
    """Of everything that computed."""
    packages = ("vit-keras-zoo", "keras", "numpy", "scipy")
    found = {package: importlib.metadata.version(package) for package in packages}
    backend = keras.backend.backend()
    module = __import__(backend)
    return {**found, backend: module.__version__, "python": platform.python_version()}


def save(certificate: dict[str, Any], path: str) -> None:
    """Write a certificate; the path holds all of it or what it held before."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(certificate, file, indent=2, allow_nan=False)
        file.write("\n")
