"""Frozen records of what weights need: resize rule, preprocessing, numerics. Imports no Keras."""

import dataclasses
from typing import Any

from vit_keras.checks import as_choice, as_pair

RESIZE_METHODS = ("align_corners", "bicubic", "antialiased_bicubic")


@dataclasses.dataclass(frozen=True)
class Resize:
    """How a table of position embeddings is interpolated to another grid.

    Args:
        method: `"align_corners"`: bilinear between corner-aligned grids, the original code's `scipy.ndimage.zoom`;
            `"bicubic"`: half-pixel centres, no antialiasing (Hugging Face, DINOv2); `"antialiased_bicubic"`:
            half-pixel centres with antialiasing (timm).
        offset: added to the new grid's height and width when the scale is computed, 0.1 in facebookresearch/dinov2
            (`interpolate_pos_encoding`), else 0. Only half-pixel methods use it.
    """

    method: str = "align_corners"
    offset: float = 0.0

    def __post_init__(self):
        as_choice(self.method, "resize", RESIZE_METHODS)

    @classmethod
    def of(cls, value: "Resize | str | dict") -> "Resize":
        """Take a rule as its method's name, as a dict of its fields, or as it is."""
        if isinstance(value, Resize):
            return value
        return cls(**value) if isinstance(value, dict) else cls(value)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


RESIZES = ("squash", "squash_crop", "short_side", "resize_small")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area")


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What happens to pixels, 0 to 255, before a model sees them.

    Args:
        resize: `"squash"` resizes to the model's height and width whatever the aspect ratio (the original code's
            evaluation, `input_pipeline.py`; Hugging Face); `"squash_crop"` resizes so to `size` divided by `crop`, and
            cuts out the centre (Hugging Face's DeiT, timm's `crop_mode="squash"`); `"short_side"` keeps the ratio, so
            that the image covers `size` divided by `crop`, and cuts out the centre (timm, torchvision);
            `"resize_small"` does so with big_vision's rounding (`pp/ops_image.py`, `resize_small`, `central_crop`).
        crop: share of the resized image's short side that is kept, timm's `crop_pct`. Squashing takes 1 alone.
        interpolation: `"nearest"`, `"bilinear"`, `"bicubic"` (a = -0.5) or `"area"` (TensorFlow's).
        antialias: whether bilinear and bicubic filter before they shrink, and round to 8 bits, as Pillow does.
        value_range: what 0 and 255 become before `mean` and `std`.
        mean, std: per channel: the model sees (x - mean) / std.
        size: (height, width) in pixels; None is not known.

    Raises:
        ValueError: a field is out of its range.
    """

    resize: str = "squash"
    crop: float = 1.0
    interpolation: str = "bilinear"
    antialias: bool = False
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    size: tuple[int, int] | None = None

    def __post_init__(self):
        as_choice(self.resize, "resize", RESIZES)
        as_choice(self.interpolation, "interpolation", INTERPOLATIONS)
        if not 0 < self.crop <= 1 or (self.resize == "squash" and self.crop != 1):
            raise ValueError(
                "`crop` must be in (0, 1], and 1 where images are squashed. Received: "
                f"crop={self.crop!r} with resize={self.resize!r}"
            )
        for name in ("value_range", "mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if len(self.value_range) != 2 or self.value_range[0] >= self.value_range[1] or min(self.std) <= 0:
            raise ValueError(
                "`value_range` must be an ascending pair and `std` positive. Received: "
                f"value_range={self.value_range!r}, std={self.std!r}"
            )
        object.__setattr__(self, "size", None if self.size is None else as_pair(self.size, "size"))

    def offset_and_scale(self, channels: int = 3) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per channel a and b of the one step (x - a) / b from 0..255 to what the model sees.

        For images of other channels than RGB, one channel takes the mean over RGB, more repeat them in turn, as the
        first kernel does when it is adapted.
        """
        low, high = self.value_range
        unit = 255 / (high - low)
        if channels == 1 and len(self.mean) > 1:
            mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
            return ((mean - low) * unit,), (std * unit,)
        turn = [index % len(self.mean) for index in range(channels)]
        return tuple((self.mean[i] - low) * unit for i in turn), tuple(self.std[i] * unit for i in turn)


ORIGINAL = Preprocessing()  # the original code's evaluation, `input_pipeline.py`
# big_vision's `resize_small(256)`, `central_crop(224)`; timm's default for ViT, `crop_pct=0.9`; Hugging Face's
# ViTImageProcessor.
BIG_VISION = Preprocessing("resize_small", crop=224 / 256, interpolation="area")
TIMM = Preprocessing("short_side", 0.9, "bicubic", True, (0.0, 1.0), mean=(0.5,) * 3, std=(0.5,) * 3)
HUGGING_FACE = Preprocessing("squash", 1.0, "bilinear", True, (0.0, 1.0), mean=(0.5,) * 3, std=(0.5,) * 3)
# DINOv2's evaluation: ImageNet's mean and deviation, a crop of 224 out of 256.
IMAGENET_MEAN = Preprocessing(
    "short_side", 224 / 256, "bicubic", True, (0.0, 1.0), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
ALIGN_CORNERS = Resize()


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What code computes with weights beside multiplying them; the defaults are the original code's.

    Args:
        gelu: `"tanh"` or `"exact"`.
        epsilon: of the LayerNorms.
        group_norm_epsilon: of the GroupNorms in a hybrid's stem.
        std_epsilon: of weight standardisation in a hybrid's stem.
        std_epsilon_in_variance: whether that is added to the variance, before the root, or to the deviation.
    """

    gelu: str = "tanh"
    epsilon: float = 1e-6
    group_norm_epsilon: float = 1e-6
    std_epsilon: float = 1e-5
    std_epsilon_in_variance: bool = False

    def of_stem(self) -> dict[str, Any]:
        """The fields that a hybrid's stem alone has."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("gelu", "epsilon")}


@dataclasses.dataclass(frozen=True)
class Weights:
    """What is known of the weights a model carries; kept as plain JSON in the config of its `embedding` layer.

    Args:
        source: name of the file (never its folder), or of the row of `vit_keras.catalog` it was fetched for.
        format: the layout it came in, `"original"` for the JAX code's.
        gelu: `"tanh"` or `"exact"`.
        epsilon: of the LayerNorms.
        resize: rule of the source for its position table.
        source_grid, grid: (height, width) in patches of the stored and of the loaded position table.
        preprocessing: what the weights expect of pixels.
        labels: name of the label set, or the class names themselves; None when unknown.
        head: whether the head is the source's.
    """

    source: str
    format: str
    gelu: str
    epsilon: float
    resize: Resize = Resize()
    source_grid: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    preprocessing: Preprocessing = Preprocessing()
    labels: str | tuple[str, ...] | None = None
    head: bool = False

    def to_dict(self) -> dict:
        """The record as plain JSON types."""
        return _jsonable(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, record: dict) -> "Weights":
        """The inverse of `to_dict`."""
        # Before 0.1.0 was released, mean and std were on the scale of the pixels themselves.
        pixels = {"value_range": (0.0, 255.0), **record["preprocessing"]}
        grids = {key: record[key] and tuple(record[key]) for key in ("source_grid", "grid")}
        labels = record.get("labels")
        grids["labels"] = tuple(labels) if isinstance(labels, list) else labels
        parts = {"resize": Resize(**record["resize"]), "preprocessing": Preprocessing(**pixels)}
        return cls(**{**record, **grids, **parts})


def _jsonable(value):
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
