"""Frozen descriptions of architectures that check themselves. Imports no Keras."""

import dataclasses
import difflib
import math
import numbers
from typing import Any, NamedTuple

from vit_keras.checks import REMAINDERS, as_choice, as_int, as_pair, as_positive, as_rate, grid_of


class Size(NamedTuple):
    """Width D, number of blocks L, MLP width and number of heads A of a Transformer."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int


# B, L, H: Dosovitskiy et al. 2021 (arXiv 2010.11929), Table 1. Ti, S: Steiner et al. 2022 (AugReg), Table 2 after
# Touvron et al. 2021 (DeiT). g, G: Zhai et al. 2022 (Scaling Vision Transformers), Table 2. So400m: Alabdulmohsin et
# al. 2023 (SoViT). The numbers are those of vision_transformer `models.py` and big_vision `models/vit.py`. mini is this
# project's own: what fits into 1.5 MB and a wheel.
SIZES = {
    "mini": Size(96, 4, 192, 3),
    "Ti": Size(192, 12, 768, 3),
    "S": Size(384, 12, 1536, 6),
    "B": Size(768, 12, 3072, 12),
    "L": Size(1024, 24, 4096, 16),
    "So400m": Size(1152, 27, 4304, 16),
    "H": Size(1280, 32, 5120, 16),
    "g": Size(1408, 40, 6144, 16),
    "G": Size(1664, 48, 8192, 16),
}


def size_letter(width: int, depth: int) -> str | None:
    """The published name of a Transformer of this width and depth, or None."""
    return next((letter for letter, size in SIZES.items() if (size.width, size.depth) == (width, depth)), None)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One named architecture: a line of a family's `VARIANTS`.

    Args:
        size: key of `SIZES`.
        patch_size: patch size in pixels of the map that is cut (the image, or the stem's output for hybrids).
        image_size: default image height and width in pixels.
        stem_layers: bottleneck units per ResNet stage; `()` is the root alone; None is no stem.
        stage: last ResNet stage that is used; with 3, the units of stage 4 join stage 3 (the paper's R50x1+ViT/16).
        classes: default number of outputs.
        weights: default name of weights.
    """

    size: str
    patch_size: int
    image_size: int
    stem_layers: tuple[int, ...] | None = None
    stage: int | None = None
    classes: int = 1000
    weights: str = "imagenet21k+imagenet2012"


POOLINGS = ("token", "gap", "map", "token_gap", "both", None)
READ_THE_CLASS_TOKEN = ("token", "token_gap", "both")
TABLE_POSITIONS = ("learned_1d", "learned_2d", "sincos_2d")
RELATIVE_POSITIONS = ("relative", "relative_bias")
POSITIONS = ("none", *TABLE_POSITIONS, *RELATIVE_POSITIONS)
GELUS = ("tanh", "exact")


@dataclasses.dataclass(frozen=True)
class Stem:
    """ResNet stem of a hybrid: root (1/4 of the image), then stages of bottleneck units (1/4, 1/8, 1/16, 1/32)."""

    layers: tuple[int, ...]
    width_factor: float = 1.0
    grey_as_rgb: bool = False  # one channel is repeated to three first, for kernels trained on RGB
    group_norm_epsilon: float = 1e-6
    std_epsilon: float = 1e-5
    std_epsilon_in_variance: bool = False  # timm's form of weight standardisation, see `layers.StdConv2D`

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(as_int(units, "stem_layers") for units in self.layers))
        if as_positive(self.width_factor, "width_factor") * 64 % 32:
            raise ValueError(
                "`width_factor` must make 64 channels a multiple of the 32 groups of GroupNorm: 0.5, 1, 1.5 … "
                f"Received: width_factor={self.width_factor!r}"
            )

    @property
    def width(self) -> int:
        """Channels of the root."""
        return int(64 * self.width_factor)

    @property
    def stride(self) -> int:
        """Image pixels per pixel of the stem's map."""
        return 4 * 2 ** max(len(self.layers) - 1, 0)

    @property
    def channels(self) -> int:
        """Channels of the stem's map."""
        return self.width * 4 * 2 ** (len(self.layers) - 1) if self.layers else self.width

    def map_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the stem's map: each of its strided SAME convolutions and pools rounds up."""
        height, width = image_size
        for _ in range(int(math.log2(self.stride))):
            height, width = -(-height // 2), -(-width // 2)
        return height, width


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """Everything that decides a model's architecture, checked. `vit.build_model` documents the fields.

    Raises:
        ValueError: a field is out of its range, or two fields contradict each other.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: tuple[int, int]
    image_size: tuple[int, int] | None = (224, 224)
    native_size: tuple[int, int] | None = None
    in_channels: int = 3
    classes: int = 1000
    activation: Any = "linear"
    include_top: bool = True
    representation_size: int | None = None
    head_bias: float = 0.0
    pooling: str | None = "token"
    norm_after_pooling: bool = False
    class_token: bool | None = None
    distillation: bool | str = False
    registers: int = 0
    position: str | None = "learned_1d"
    class_position: bool | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    qkv_bias: bool = True
    gelu: str | None = "tanh"
    epsilon: float | None = 1e-6
    remainder: str = "error"
    stem: Stem | None = None
    dtype: Any = None
    name: str = "vit"

    def __post_init__(self):
        self._check_numbers()
        self._check_tokens()
        if self.image_size is None:
            self._set(native_size=as_pair(self.native_size or 224, "native_size"))
        else:
            if self.native_size is not None:
                raise ValueError("`native_size` belongs to `image_size=None`: a model of one size is its own native.")
            self._set(image_size=as_pair(self.image_size, "image_size"))
        _ = self.grid

    @classmethod
    def of(cls, **fields: Any) -> "ViTSpec":
        """A spec from a user's keyword arguments; a name that is none gets a sentence of its own.

        Raises:
            TypeError: an argument is not known; the nearest one is named.
            ValueError: as for the spec itself.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"There is no argument {name!r}.{hint} See vit_keras.vit.build_model for all of them.")
        return cls(**fields)

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self):
        for name in ("width", "depth", "num_heads", "mlp_dim", "in_channels", "classes"):
            self._set(**{name: as_int(getattr(self, name), name)})
        for name in ("dropout", "attention_dropout", "drop_path"):
            self._set(**{name: as_rate(getattr(self, name), name)})
        if self.width % self.num_heads:
            raise ValueError(
                f"The width must be divisible by the number of heads. Received: hidden_size={self.width}, "
                f"num_heads={self.num_heads}"
            )
        representation = as_int(self.representation_size or 0, "representation_size", minimum=0) or None
        self._set(patch_size=as_pair(self.patch_size, "patch_size"), representation_size=representation)
        self._set(
            gelu=as_choice(self.gelu or "tanh", "gelu", GELUS),
            epsilon=as_positive(1e-6 if self.epsilon is None else self.epsilon, "epsilon"),
        )
        as_choice(self.remainder, "remainder", REMAINDERS)
        if not isinstance(self.head_bias, numbers.Real):
            raise ValueError(f"`head_bias` must be a number. Received: head_bias={self.head_bias!r}")

    def _check_tokens(self):
        as_choice(self.pooling, "pooling", POOLINGS)
        position = as_choice(self.position or "none", "position", POSITIONS)
        reads = self.pooling in READ_THE_CLASS_TOKEN
        class_token = reads or bool(self.distillation) if self.class_token is None else bool(self.class_token)
        if (reads or self.distillation) and not class_token:
            what = "distillation=True stands beside" if self.distillation else f"pooling={self.pooling!r} reads"
            raise ValueError(f"{what} the class token: it needs class_token=True, or another pooling.")
        self._check_pooling()
        if self.class_position and not (position == "learned_1d" and class_token):
            raise ValueError(
                "class_position=True gives the class token a row of the position table: it needs "
                f"position='learned_1d' and a class token. Received: position={position!r}, class_token={class_token}"
            )
        has_row = position == "learned_1d" and class_token and self.class_position is not False
        registers = as_int(self.registers, "registers", minimum=0)
        self._set(position=position, class_token=class_token, class_position=has_row, registers=registers)

    def _check_pooling(self):
        as_choice(self.distillation, "distillation", (False, True, "token"))
        if self.pooling == "both" and self.distillation is not True:
            raise ValueError("pooling='both' reads class and distillation token: it needs distillation=True.")
        if self.distillation is True and self.pooling not in ("token", "both"):
            raise ValueError(f"distillation=True needs pooling='token' or 'both'. Received: pooling={self.pooling!r}")
        if self.distillation is True and (self.representation_size or self.norm_after_pooling):
            raise ValueError("distillation=True has no place for `representation_size` or `norm_after_pooling`.")
        if self.norm_after_pooling and self.pooling not in ("token", "gap"):
            raise ValueError(
                f"norm_after_pooling=True needs pooling='gap' or 'token'. Received: pooling={self.pooling!r}"
            )

    @property
    def prefix_tokens(self) -> int:
        """Tokens that stand before the patch tokens: class and distillation token, registers."""
        return int(bool(self.class_token)) + int(bool(self.distillation)) + self.registers

    @property
    def prefix_rows(self) -> int:
        """Rows of the position table that stand before its grid."""
        return 1 + int(bool(self.distillation)) if self.class_position else 0

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in patches of the position table: of the image, or of the native size for any size."""
        size = self.image_size or self.native_size
        assert size is not None
        if self.stem is None:
            return grid_of(size, self.patch_size, self.remainder)
        return grid_of(self.stem.map_size(size), self.patch_size, self.remainder, self.stem.stride)
