"""The JSON files of keras-hub's ViT presets, read and written."""

from collections.abc import Collection, Mapping
from typing import Any

import keras

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import Facts
from vit_keras.checkpoints.files import IMAGE_CONVERTER, TASK_CONFIG
from vit_keras.checkpoints.format import config_choice, config_number, config_pair, config_part
from vit_keras.checks import as_pair
from vit_keras.records import Numerics, Preprocessing, Weights

EMBEDDING = "layers/vi_t_patching_and_embedding"
ACTIVATIONS = ("linear", "softmax", "sigmoid")


def known(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """What `config.json`, `task.json` and `image_converter.json` of a preset say."""
    if config.get("class_name") != "ViTBackbone":
        return {}
    inner = config_part(config, "config")
    shape = inner.get("image_shape")
    shapes = {
        "depth": config_number(inner, "num_layers"),
        "width": config_number(inner, "hidden_dim"),
        "mlp_dim": config_number(inner, "mlp_dim"),
        "num_heads": config_number(inner, "num_heads"),
        "patch_size": config_pair(inner, "patch_size"),
        "class_token": inner.get("use_class_token"),
    }
    result = {
        "shapes": shapes,
        "numerics": Numerics("exact", config_number(inner, "layer_norm_epsilon", 1e-6)),
        "image_size": config_pair({"image_shape": shape[:2]}, "image_shape") if isinstance(shape, list) else None,
        "preprocessing": preprocessing(config_part(config_part(config, IMAGE_CONVERTER), "config")),
        **_task(config_part(config_part(config, TASK_CONFIG), "config"), f"{EMBEDDING}/vars/0" in keys),
    }
    return {name: value for name, value in result.items() if value is not None}


def _task(task: Mapping[str, Any], class_token: bool) -> dict[str, Any]:
    """Pooling and activation of a `ViTImageClassifier`."""
    if not task:
        return {}
    pooling = config_choice(task, "pooling", ("token", "gap"), "token")
    if (pooling == "token") != class_token:
        raise CheckpointError(
            f"task.json: pooling {pooling!r} {'beside' if class_token else 'without'} a class token, which keras-hub "
            "takes for a patch like the others, is not supported"
        )
    activation = task.get("activation") or "linear"
    config_choice({"activation": activation}, "activation", ACTIVATIONS)
    return {"pooling": pooling, "architecture": {"activation": activation}}


def preprocessing(converter: Mapping[str, Any]) -> Preprocessing | None:
    """What `ViTImageConverter` does to pixels: times `scale`, plus `offset`; None without one."""
    if not converter:
        return None
    try:
        scales, offsets = (_channels(converter.get(name), default) for name, default in (("scale", 1), ("offset", 0)))
        size = converter.get("image_size")
        return Preprocessing(
            resize="short_side" if converter.get("crop_to_aspect_ratio", True) else "squash",
            interpolation=converter.get("interpolation", "bilinear"),
            antialias=bool(converter.get("antialias")),
            value_range=(0.0, 255.0),
            mean=tuple(-offset / scale for scale, offset in zip(scales, offsets)),
            std=tuple(1 / scale for scale in scales),
            size=None if size is None else as_pair(size, "image_size"),
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{IMAGE_CONVERTER}.json: cannot be read ({error})") from None


def _channels(value: Any, default: float) -> tuple[float, ...]:
    """A number, or one a channel, as three."""
    values = default if value is None else value
    return tuple(map(float, values)) if isinstance(values, list) else (float(values),) * 3


def _object(module: str, class_name: str, /, **config: Any) -> dict[str, Any]:
    """A Keras object as its JSON, of a class of keras-hub."""
    path = f"keras_hub.src.models.vit.{module}"
    return {"module": path, "class_name": class_name, "config": config, "registered_name": f"keras_hub>{class_name}"}


def preset_files(facts: Facts, record: Weights, parameters: int, activation: str) -> dict[str, Any]:
    """Name → content of every JSON file of a preset whose backbone has so many parameters."""
    height, width = facts.native_size or (0, 0)
    backbone = _object(
        "vit_backbone",
        "ViTBackbone",
        name="vi_t_backbone",
        trainable=True,
        image_shape=[height, width, facts.in_channels],
        patch_size=list(facts.patch_size),
        num_layers=facts.depth,
        num_heads=facts.num_heads,
        hidden_dim=facts.width,
        mlp_dim=facts.mlp_dim,
        dropout_rate=0.0,
        attention_dropout=0.0,
        layer_norm_epsilon=record.epsilon,
        use_mha_bias=True,
        use_mlp_bias=True,
        use_class_token=facts.class_token,
        use_patch_bias=True,
    )
    converter, preprocessor = _preprocessing(record, facts)
    files = {
        "config.json": backbone,
        "metadata.json": {
            "keras_version": keras.version(),
            "keras_hub_version": KERAS_HUB,
            "parameter_count": parameters,
            "date_saved": "",
            "tasks": ["ImageClassifier"] if facts.classes else [],
        },
        "image_converter.json": converter,
        "preprocessor.json": preprocessor,
    }
    if facts.classes:
        files["task.json"] = _object(
            "vit_image_classifier",
            "ViTImageClassifier",
            backbone=backbone,
            preprocessor=preprocessor,
            name="vi_t_image_classifier",
            num_classes=facts.classes,
            pooling=facts.pooling,
            activation=None if activation == "linear" else activation,
            dropout=0.0,
            intermediate_dim=facts.representation_size,
        )
    return files


KERAS_HUB = "0.32.0"


def _preprocessing(record: Weights, facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    pixels = record.preprocessing
    offsets, scales = pixels.offset_and_scale(facts.in_channels)
    converter = _object(
        "vit_image_converter",
        "ViTImageConverter",
        name="vi_t_image_converter",
        trainable=True,
        image_size=list(facts.native_size or ()),
        scale=[1 / scale for scale in scales],
        offset=[-offset / scale for offset, scale in zip(offsets, scales)],
        interpolation=pixels.interpolation
        if pixels.interpolation in ("bilinear", "bicubic", "nearest")
        else "bilinear",
        antialias=pixels.antialias,
        crop_to_aspect_ratio=pixels.resize != "squash",
        pad_to_aspect_ratio=False,
        bounding_box_format="yxyx",
    )
    preprocessor = _object(
        "vit_image_classifier_preprocessor",
        "ViTImageClassifierPreprocessor",
        name="vi_t_image_classifier_preprocessor",
        trainable=True,
        image_converter=converter,
        config_file="preprocessor.json",
    )
    return converter, preprocessor
