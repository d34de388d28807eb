"""What a certificate compares: the stages of a Keras model, and those of the reference."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from conversion import layouts, reference
from vit_keras import checkpoints, registry
from vit_keras.checkpoints import rules
from vit_keras.checkpoints.model import load_keras
from vit_keras.layers import TransformerBlock
from vit_keras.records import Resize

# Options of a conversion that the reference follows, or that change nothing it computes.
FOLLOWED = {"image_size", "native_size", "patch_size", "classes", "in_channels", "num_heads", "source_grid", "resize"}
FOLLOWED |= {"remainder", "pooling", "gelu", "epsilon", "include_top", "name"}
FOLLOWED |= {"dropout", "attention_dropout", "drop_path", "activation", "dtype"}

Stages = dict[str, np.ndarray]


def inputs(height: int, width: int, channels: int = 3, count: int = 2) -> np.ndarray:
    """The images of every certificate, float32 (count, H, W, C) in [-1, 1]: half noise of a seed, half waves."""
    noise = np.random.default_rng(0).uniform(-1, 1, (count, height, width, channels))
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    waves = np.sin(0.11 * y + 0.07 * x + c)[None] * np.linspace(1, 0.5, count)[:, None, None, None]
    return ((noise + waves) / 2).astype("float32")


def at_full_precision(model: keras.Model) -> keras.Model:
    """The model, computing in float32: what is judged are weights, not a dtype."""
    if rules.find_backbone(model).get_layer("embedding").compute_dtype in ("float32", "float64"):
        return model
    return registry.from_checkpoint(model, dtype="float32")


def inputs_of(model: keras.Model, options: Mapping[str, Any]) -> np.ndarray:
    """`inputs` of the size that a model takes; for any size, that of its position table."""
    height, width, channels = model.input_shape[1:]
    if height is None or width is None:
        native = options.get("native_size") or checkpoints.checkpoint_of(model).facts.native_size or 224
        height, width = (native, native) if isinstance(native, int) else native
    return inputs(height, width, channels)


def check_options(options: Iterable[str]) -> None:
    """
    Raises:
        ValueError: the reference does not follow one of the options.
    """
    unknown = sorted(set(options) - FOLLOWED)
    if unknown:
        raise ValueError(f"A certificate follows {', '.join(sorted(FOLLOWED))}. Received: {', '.join(unknown)}")


def target_model(target: str, build: Callable[[], keras.Model], grid: tuple[int, int] | None = None) -> keras.Model:
    """The Keras model of what a conversion wrote; `build` makes that of its source, where the target lacks one.
    `grid` is that of the position table, which an `.npz` does not say.

    Raises:
        CheckpointError: it cannot be read.
    """
    if target.endswith(".keras"):
        return load_keras(target)
    if target.endswith(".weights.h5"):
        model = build()
        for variable in model.variables:  # what the file does not fill, shows
            variable.assign(keras.ops.zeros_like(variable))
        model.load_weights(target)
        return model
    return build() if is_saved_model(target) else registry.from_checkpoint(target, source_grid=grid)


def grid_of(checkpoint: checkpoints.Checkpoint, options: Mapping[str, Any]) -> tuple[int, int] | None:
    """The grid of patches of what a checkpoint was converted to."""
    size, facts = options.get("image_size"), checkpoint.facts
    if size is None:
        return options.get("source_grid") or checkpoint.source_grid or facts.grid
    patch = options.get("patch_size") or facts.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    patch = (patch, patch) if isinstance(patch, int) else tuple(patch)
    rounded = 1 if options.get("remainder") == "pad" else 0  # up, or down
    rows, columns = dataclasses.replace(facts, patch_size=(1, 1)).grid_of((height, width))
    return (rows + rounded * (patch[0] - 1)) // patch[0], (columns + rounded * (patch[1] - 1)) // patch[1]


def is_saved_model(path: str) -> bool:
    """Whether a folder is TensorFlow's SavedModel."""
    return os.path.isfile(os.path.join(path, "saved_model.pb"))


def serve(path: str, images: np.ndarray) -> np.ndarray:
    """What a SavedModel answers."""
    import tensorflow as tf

    loaded = tf.saved_model.load(path)  # kept, for its variables go with it
    return np.asarray(loaded.serve(images))


def is_foreign(path: str | None) -> bool:
    """Whether the reference reads a target: a folder of another library, or an `.npz`."""
    if path is None or path.endswith((".keras", ".weights.h5")) or is_saved_model(path):
        return False
    try:
        layouts.layout_of(layouts.read_arrays(path))
    except ValueError:
        return False
    return True


def settings_of(checkpoint: checkpoints.Checkpoint, options: Mapping[str, Any]) -> reference.Settings:
    """What the reference has to be told of a checkpoint and of what was changed on the way."""
    facts = checkpoint.facts
    pooling = options.get("pooling", facts.pooling)
    resize = checkpoint.resize if options.get("resize") is None else Resize.of(options["resize"])
    numerics = vars(checkpoint.numerics) | {key: options[key] for key in ("gelu", "epsilon") if key in options}
    grid = options.get("source_grid", checkpoint.source_grid)
    return reference.Settings(
        num_heads=options.get("num_heads") or facts.num_heads or facts.published_heads or 0,
        pooling="token" if pooling == "both" else pooling,
        norm_after_pooling=facts.norm_after_pooling,
        remainder=options.get("remainder", "error"),
        resize=resize.method,
        resize_offset=resize.offset,
        source_grid=None if grid is None else tuple(grid),
        **numerics,
    )


def reference_stages(
    path: str, settings: reference.Settings, images: np.ndarray, options: Mapping[str, Any], classes: int | None
) -> Stages:
    """The stages of the reference's forward pass on the arrays of a file, which it reads by itself.

    Args:
        path: of the file or folder.
        settings: what it does not tell.
        images: (B, H, W, C).
        options: what was changed on the way.
        classes: of the file's head; another number asked for, or no head, leaves it out.
    """
    arrays = layouts.read_arrays(path)
    parameters = reference.read(arrays, layouts.layout_of(arrays))
    if options.get("patch_size"):
        size = options["patch_size"]
        size = (size, size) if isinstance(size, int) else tuple(size)
        parameters["embedding"]["kernel"] = reference.resize_patch(parameters["embedding"]["kernel"], size)
    first, name = (parameters["stem"], "conv") if "stem" in parameters else (parameters["embedding"], "kernel")
    channels = images.shape[-1]
    if channels == 1 and first[name].shape[2] == 3:
        images = np.repeat(images, 3, axis=-1)
    elif channels != first[name].shape[2]:
        first[name] = first[name][:, :, np.arange(channels) % 3] * 3 / channels
    if options.get("classes") not in (None, classes) or not options.get("include_top", True):
        parameters = {name: value for name, value in parameters.items() if not name.startswith("head")}
    return reference.forward(parameters, settings, images)


def keras_stages(model: keras.Model, images: np.ndarray) -> Stages:
    """The same stages of a Keras model; what its head receives is `features`, and `logits` is before its activation."""
    backbone = rules.find_backbone(model)
    names = {layer.name for layer in backbone.layers}
    blocks = [layer for layer in backbone.layers if isinstance(layer, TransformerBlock)]
    stages = {"embedding": backbone.get_layer("embedding").output}
    stages |= {f"block_{index}": block.output for index, block in enumerate(blocks)}
    if "Transformer_encoder_norm" in names:
        stages["encoded"] = backbone.get_layer("Transformer_encoder_norm").output
    stages["features"] = backbone.get_layer("head").input if "head" in names else backbone.output
    if "head" in names:
        stages["logits"] = backbone.output
    activations = [(layer, layer.activation) for layer in backbone.layers if layer.name in ("head", "head_dist")]
    try:
        for layer, _ in activations:  # logits are compared
            layer.activation = keras.activations.linear
        outputs = keras.Model(backbone.input, stages)(images, training=False)
    finally:
        for layer, activation in activations:
            layer.activation = activation
    found = {name: keras.ops.convert_to_numpy(value) for name, value in outputs.items()}
    if "head_dist" in names and found["logits"].ndim == 3:  # pooling="both" gives the two of which others give the mean
        found["logits"] = found["logits"].mean(axis=1)
    return found


def compare(found: Stages, expected: Stages) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Largest and mean absolute difference of each stage, and the largest as a share of the stage's largest value.

    Returns:
        The stages that can be compared, and what is wrong with the others: a stage that one of the two lacks, another
        shape, values that are no numbers.
    """
    blocks = {name for name in found.keys() | expected.keys() if name.startswith("block_")}
    must = {"embedding", *blocks, "features", *({"logits"} & expected.keys())}
    stages, problems = {}, []
    for name in [*found, *sorted(must - found.keys())]:
        if name not in found or name not in expected:
            if name in must:
                problems.append(f"{name}: only {'the reference' if name in expected else 'the Keras model'} has it")
            continue
        a, b = np.asarray(found[name], "float64"), expected[name]
        if a.shape != b.shape:
            problems.append(f"{name}: shape {a.shape}, expected {b.shape}")
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            problems.append(f"{name}: values that are not finite")
        else:
            difference, scale = np.abs(a - b), float(np.abs(b).max())
            largest = float(difference.max())
            stages[name] = {"max": largest, "mean": float(difference.mean()), "relative": largest / (scale or 1.0)}
    return stages, problems
