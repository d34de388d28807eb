"""The proof of a conversion: a Keras model against the NumPy reference on the source's own arrays, as JSON.

The reference reads the source by itself, so that a mistake in the library's tables shows. What neither can read off
the arrays (number of heads, GELU, epsilon, pooling, rule for positions) is taken from what the library knows of the
source, and written down.
"""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import keras
import numpy as np

from conversion import layouts, reference
from vit_keras import checkpoints, converter, registry
from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import replacing
from vit_keras.checkpoints.cache import digest
from vit_keras.layers import TransformerBlock

TOLERANCE = 2e-5  # of the largest value of a stage; float32 against float64 is below 5e-6 in models of 12 blocks


def inputs(height: int, width: int, channels: int = 3, count: int = 2) -> np.ndarray:
    """The images of every certificate, float32 (count, H, W, C) in [-1, 1]: half noise of a seed, half waves."""
    noise = np.random.default_rng(0).uniform(-1, 1, (count, height, width, channels))
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    waves = np.sin(0.11 * y + 0.07 * x + c)[None] * np.linspace(1, 0.5, count)[:, None, None, None]
    return ((noise + waves) / 2).astype("float32")


def certify(
    source: str, target: str | None = None, *, format: str | None = None, tolerance: float = TOLERANCE, **options: Any
) -> dict[str, Any]:
    """Run the Keras model of a checkpoint and the reference on the same images, and compare every stage.

    Args:
        source: path of a checkpoint of another library, which the reference reads.
        target: what it was converted to, whose model is judged: a `.keras` file, or anything that
            `vit_keras.from_checkpoint` reads. None (default) judges the model that the source itself gives.
        format: of the source; None (default) recognises it.
        tolerance: of the verdict: the largest difference of any stage, as a share of the stage's largest value.
        **options: of `vit_keras.from_checkpoint`, such as `image_size`. They must be those of the conversion.

    Returns:
        The certificate, plain JSON: digests, versions, settings, differences per stage, verdict.

    Raises:
        CheckpointError, ValueError: the source or the target cannot be read.
    """
    checkpoint = converter.open_source(source, format, options.get("source_grid"))
    model = registry.build_and_load(checkpoint, **options)[0] if target is None else open_target(target, options)
    height, width, channels = model.input_shape[1:]
    images = inputs(height, width, channels)
    expected = reference_outputs(source, checkpoint, images, options)
    stages = compare(keras_outputs(model, images), expected)
    worst = max(stage["relative"] for stage in stages.values())
    return {
        "source": {"name": os.path.basename(source.rstrip("/")), "format": checkpoint.format.name}
        | {"sha256": digests(source)},
        "target": None if target is None else {"name": os.path.basename(target.rstrip("/")), "sha256": digests(target)},
        "options": {name: value for name, value in options.items() if value is not None},
        "images": {"shape": list(images.shape), "generator": "conversion.certificate.inputs"},
        "settings": vars(settings_of(checkpoint, options)),
        "stages": stages,
        "tolerance": tolerance,
        "verdict": "pass" if worst <= tolerance else "fail",
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def open_target(target: str, options: dict[str, Any]) -> keras.Model:
    """The Keras model of what a conversion wrote."""
    checkpoint = converter.open_source(target, None)
    heads = {"num_heads": options["num_heads"]} if "num_heads" in options else {}
    return registry.from_checkpoint(checkpoint, **heads)


def settings_of(checkpoint: checkpoints.Checkpoint, options: dict[str, Any]) -> reference.Settings:
    """What the reference has to be told."""
    facts, numerics = checkpoint.facts, checkpoint.numerics
    return reference.Settings(
        num_heads=options.get("num_heads") or facts.num_heads or facts.published_heads or 0,
        pooling="token" if facts.pooling == "both" else facts.pooling,
        norm_after_pooling=facts.norm_after_pooling,
        remainder=options.get("remainder", "error"),
        resize=checkpoint.resize.method,
        resize_offset=checkpoint.resize.offset,
        source_grid=checkpoint.source_grid,
        **vars(numerics),
    )


def reference_outputs(
    source: str, checkpoint: checkpoints.Checkpoint, images: np.ndarray, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The stages of the reference's forward pass on the source's own arrays."""
    arrays = layouts.read_arrays(source)
    parameters = reference.read(arrays, layouts.layout_of(arrays))
    if "patch_size" in options:
        size = options["patch_size"]
        size = (size, size) if isinstance(size, int) else tuple(size)
        parameters["embedding"]["kernel"] = reference.resize_patch(parameters["embedding"]["kernel"], size)
    if "classes" in options and options["classes"] != checkpoint.facts.classes:
        parameters = {name: value for name, value in parameters.items() if not name.startswith("head")}
    return reference.forward(parameters, settings_of(checkpoint, options), images)


def keras_outputs(model: keras.Model, images: np.ndarray) -> dict[str, np.ndarray]:
    """The same stages of a Keras model."""
    backbone = rules.find_backbone(model)
    stages = {"embedding": backbone.get_layer("embedding").output}
    blocks = [layer for layer in backbone.layers if isinstance(layer, TransformerBlock)]
    stages |= {f"block_{index}": block.output for index, block in enumerate(blocks)}
    names = {layer.name for layer in backbone.layers}
    if "Transformer_encoder_norm" in names:
        stages["encoded"] = backbone.get_layer("Transformer_encoder_norm").output
    stages["logits" if "head" in names else "features"] = backbone.output
    outputs = keras.Model(backbone.input, stages)(images, training=False)
    return {name: np.asarray(value) for name, value in outputs.items()}


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Largest and mean absolute difference of each stage that both have, and the largest as a share of the stage."""
    stages = {}
    for name in found:
        if name in expected:
            difference, scale = np.abs(found[name] - expected[name]), float(np.abs(expected[name]).max())
            largest = float(difference.max())
            stages[name] = {"max": largest, "mean": float(difference.mean()), "relative": largest / (scale or 1.0)}
    return stages


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
        json.dump(certificate, file, indent=2)
        file.write("\n")
