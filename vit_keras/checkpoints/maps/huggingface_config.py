"""The JSON files beside a model of Hugging Face transformers, read and written."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from vit_keras import labels
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.facts import Facts
from vit_keras.checkpoints.files import PROCESSOR
from vit_keras.checkpoints.format import config_choice, config_number, config_pair, config_part
from vit_keras.checks import as_pair
from vit_keras.records import Numerics, Preprocessing, Weights

GELUS = {"gelu": "exact", "gelu_python": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh"}
MODELS = ("vit", "deit", "dinov2", "dinov2_with_registers")


def known(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """What the `config.json` of transformers says."""
    if "hidden_size" not in config:
        return {}
    model = config_choice(config, "model_type", MODELS)
    act = config_choice(config, "hidden_act", GELUS, "gelu")
    if config.get("use_swiglu_ffn"):
        raise CheckpointError("config.json: use_swiglu_ffn, the gated MLP of DINOv2's largest size, is not supported")
    if any("pooler." in key for key in keys):
        config_choice(config, "pooler_act", ("tanh",), "tanh")
    default = VIT_EPSILON if model in ("vit", "deit") else DINOV2_EPSILON
    result = {
        "preprocessing": preprocessing(config_part(config, PROCESSOR)),
        "labels": _labels(config_part(config, "id2label")),
        "num_heads": config_number(config, "num_attention_heads"),
        "numerics": Numerics(GELUS[act], config_number(config, "layer_norm_eps", default)),
        "image_size": config_pair(config, "image_size"),
        "shapes": {
            "width": config_number(config, "hidden_size"),
            "depth": config_number(config, "num_hidden_layers"),
            "mlp_dim": config_number(config, "intermediate_size") if model in ("vit", "deit") else None,
            "patch_size": config_pair(config, "patch_size"),
            "in_channels": config_number(config, "num_channels"),
            "qkv_bias": config.get("qkv_bias"),
        },
    }
    return {name: value for name, value in result.items() if value is not None}


def _labels(names: Mapping[str, Any]) -> str | tuple[str, ...] | None:
    found = [name for index in range(len(names)) if isinstance(name := names.get(str(index)), str)]
    return labels.known(found) if len(found) == len(names) else None  # else there are gaps


def preprocessing(processor: Mapping[str, Any]) -> Preprocessing | None:
    """What `preprocessor_config.json` says; None without one, or with a warning where it cannot be followed."""
    if not processor:
        return None
    try:
        outer, crop = _size(processor.get("size")), _size(processor.get("crop_size"))
        crops = crop is not None and processor.get("do_center_crop", True)
        inner = crop if crops else outer
        keeps_aspect = "shortest_edge" in (processor["size"] if isinstance(processor.get("size"), dict) else {})
        factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
        normalised = processor.get("do_normalize", True)
        return Preprocessing(
            resize="short_side" if keeps_aspect else "squash" if inner == outer else "squash_crop",
            crop=min(inner) / min(outer) if inner and outer else 1.0,
            interpolation={number: name for name, number in RESAMPLE.items()}[processor.get("resample", 2)],
            antialias=True,
            value_range=(0.0, 255 * factor),
            mean=tuple(processor.get("image_mean", (0.5,) * 3)) if normalised else (0.0,) * 3,
            std=tuple(processor.get("image_std", (0.5,) * 3)) if normalised else (1.0,) * 3,
            size=inner,
        )
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        warnings.warn(
            f"{PROCESSOR}.json cannot be followed ({error}); pixels are scaled as transformers does by default. "
            "Preprocess them as the model's authors did.",
            stacklevel=2,
        )
        return None


def _size(value: Any) -> tuple[int, int] | None:
    """A size as processors of any year write it, as (height, width)."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = (edge, edge) if edge else (value["height"], value["width"])
    return None if value is None else as_pair(value, "size")


RESAMPLE = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's numbers
VIT_EPSILON, DINOV2_EPSILON = 1e-12, 1e-6  # the defaults of ViTConfig and DeiTConfig, and of the Dinov2 ones


def common_config(facts: Facts, record: Weights, model: str, architecture: str) -> dict[str, Any]:
    square = facts.native_size is not None and facts.native_size[0] == facts.native_size[1]
    config = {
        "architectures": [architecture],
        "model_type": model,
        "hidden_size": facts.width,
        "num_hidden_layers": facts.depth,
        "num_attention_heads": facts.num_heads,
        "hidden_act": "gelu" if record.gelu == "exact" else "gelu_pytorch_tanh",
        "layer_norm_eps": record.epsilon,
        "image_size": facts.native_size[0] if square and facts.native_size else list(facts.native_size or ()),
        "patch_size": facts.patch_size[0] if facts.patch_size[0] == facts.patch_size[1] else list(facts.patch_size),
        "num_channels": facts.in_channels,
        "qkv_bias": facts.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return {**config, **_label_config(facts, record)}


def _label_config(facts: Facts, record: Weights) -> dict[str, Any]:
    if not facts.classes:
        return {}
    names = labels.of(record.labels, facts.classes) or [f"LABEL_{index}" for index in range(facts.classes)]
    # Names may stand twice (ImageNet has two cranes); both directions must be maps.
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in reversed(list(enumerate(names)))},
    }


def folder_files(config: dict[str, Any], record: Weights, facts: Facts) -> dict[str, Any]:
    pixels, (low, high) = record.preprocessing, record.preprocessing.value_range
    height, width = facts.native_size or pixels.size or (224, 224)  # of the model, not of the weights it began with
    processor: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": RESAMPLE.get(pixels.interpolation, RESAMPLE["bilinear"]),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [(mean - low) / (high - low) for mean in pixels.mean],
        "image_std": [std / (high - low) for std in pixels.std],
    }
    if pixels.resize != "squash":
        outer_height, outer_width = (round(length / pixels.crop) for length in (height, width))
        squash = pixels.resize == "squash_crop"
        processor |= {
            "image_processor_type": "DeiTImageProcessor" if squash else "BitImageProcessor",
            "size": {"height": outer_height, "width": outer_width}
            if squash
            else {"shortest_edge": min(outer_height, outer_width)},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    return {"config.json": config, f"{PROCESSOR}.json": processor}
