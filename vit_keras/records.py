"""Frozen records of what weights need: resize rule, preprocessing, numerics. Imports no Keras."""

import dataclasses

from vit_keras.checks import as_choice

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


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What happens to pixels before a model sees them.

    Args:
        resize: `"squash"` resizes to the model's height and width whatever the aspect ratio (the original code's
            evaluation, `input_pipeline.py`).
        interpolation: interpolation of the resize.
        antialias: whether the resize filters before it shrinks.
        mean, std: per-channel values, on the 0 to 255 scale: the model sees (x - mean) / std.
    """

    resize: str = "squash"
    interpolation: str = "bilinear"
    antialias: bool = False
    mean: tuple[float, ...] = (127.5, 127.5, 127.5)
    std: tuple[float, ...] = (127.5, 127.5, 127.5)

    def __post_init__(self):
        as_choice(self.resize, "resize", ("squash",))
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))


@dataclasses.dataclass(frozen=True)
class Weights:
    """What is known of the weights a model carries; kept as plain JSON in the config of its `embedding` layer.

    Args:
        source: name of the file (never its folder).
        format: the layout it came in, `"original"` for the JAX code's.
        gelu: `"tanh"` or `"exact"`.
        epsilon: of the LayerNorms.
        resize: rule of the source for its position table.
        source_grid, grid: (height, width) in patches of the stored and of the loaded position table.
        preprocessing: what the weights expect of pixels.
        labels: name of the label set, None when unknown.
    """

    source: str
    format: str
    gelu: str
    epsilon: float
    resize: Resize = Resize()
    source_grid: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    preprocessing: Preprocessing = Preprocessing()
    labels: str | None = None

    def to_dict(self) -> dict:
        """The record as plain JSON types."""
        return _jsonable(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, record: dict) -> "Weights":
        """The inverse of `to_dict`."""
        grids = {key: record[key] and tuple(record[key]) for key in ("source_grid", "grid")}
        parts = {"resize": Resize(**record["resize"]), "preprocessing": Preprocessing(**record["preprocessing"])}
        return cls(**{**record, **grids, **parts})


def _jsonable(value):
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
