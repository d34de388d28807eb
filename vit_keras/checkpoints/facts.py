"""What a checkpoint is, told by the variables it fills and their shapes alone."""

import dataclasses
import re
from collections.abc import Mapping

from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.layers import square_grid
from vit_keras.records import Numerics
from vit_keras.spec import SIZES, Stem, size_letter

POSITIONS = "Transformer_posembed_input/pos_embedding"
ATTENTION = "MultiHeadDotProductAttention_0"
_BLOCK = re.compile(r"Transformer_encoderblock_(\d{1,4})/.+")
_UNIT = re.compile(r"block(\d{1,4})_unit(\d{1,4})/.+")

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The architecture that a checkpoint was saved from.

    Args:
        width, depth, mlp_dim: of the Transformer.
        num_heads: of the Transformer, or None where shapes do not tell it.
        patch_size: (height, width), in pixels of the image or of the stem's map.
        in_channels: of the images.
        stem: ResNet stem of a hybrid, or None.
        class_token: whether there is one.
        distillation: True with a distillation token and its head, `"token"` with the token alone, or False.
        registers: number of register tokens.
        prefix_rows: rows of the position table that stand before its grid.
        places: the other rows of the position table; 0 without one.
        grid: (height, width) in patches on which these lie, or None when it is not known.
        pooling: what the head reads; a class token is taken to be read.
        norm_after_pooling: whether the last norm stands behind the pooling.
        layer_scale, qkv_bias: whether the blocks have them.
        representation_size: width of `pre_logits`, or None.
        classes: of the head, or None without a head.
        activation: of the head; no file of arrays tells it.
    """

    width: int
    depth: int
    num_heads: int | None
    mlp_dim: int
    patch_size: tuple[int, int]
    in_channels: int
    stem: Stem | None
    class_token: bool
    distillation: bool | str
    registers: int
    prefix_rows: int
    places: int
    grid: tuple[int, int] | None
    pooling: str | None
    norm_after_pooling: bool
    layer_scale: bool
    qkv_bias: bool
    representation_size: int | None
    classes: int | None
    activation: str = "linear"

    @property
    def class_position(self) -> bool:
        """Whether the class token has a row in the position table."""
        return self.prefix_rows > 0

    @property
    def map_head(self) -> bool:
        """Whether the head is attention pooling."""
        return self.pooling == "map"

    @property
    def native_size(self) -> tuple[int, int] | None:
        """Image size (height, width) whose patches lie on the grid of the position table, or None."""
        return self.grid and self.image_size_of(self.grid)

    def image_size_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Image size (height, width) whose patches lie on `grid`."""
        stride = self.stem.stride if self.stem else 1
        return grid[0] * self.patch_size[0] * stride, grid[1] * self.patch_size[1] * stride

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """The grid, in whole patches, of an image of this size."""
        height, width = self.stem.map_size(image_size) if self.stem else image_size
        return height // self.patch_size[0], width // self.patch_size[1]

    @property
    def published_heads(self) -> int | None:
        """Number of heads of the published Transformer of this width, depth and MLP, or None if there is none."""
        sizes = SIZES.values()
        same = (
            size for size in sizes if (size.width, size.depth, size.mlp_dim) == (self.width, self.depth, self.mlp_dim)
        )
        return next((size.num_heads for size in same), None)


def describe(width: int, depth: int, patch_size: tuple[int, int], stem: Stem | None = None) -> str:
    """A sentence such as "12 blocks of width 192 with patch 16: Ti/16"."""
    patch = f"{patch_size[0]}" if patch_size[0] == patch_size[1] else f"{patch_size[0]}x{patch_size[1]}"
    text = f"{depth} blocks of width {width} with patch {patch}"
    letter = size_letter(width, depth)
    if stem is not None:
        text += f" on a ResNet stem of {stem.layers} units"
    if letter is None:
        return text
    if stem is None:
        return f"{text}: {letter}/{patch}"
    if not stem.layers:
        # Published as R+Ti/16, though its patches are 4 * 8 image pixels.
        return f"{text}: R+{letter}"
    return f"{text}: R{3 * sum(stem.layers) + 2}+{letter}/{stem.stride * patch_size[0]}"


def facts_of(
    shapes: Shapes,
    prefix_rows: int,
    num_heads: int | None,
    numerics: Numerics,
    grid: tuple[int, int] | None = None,
) -> Facts | None:
    """Read the facts off the shapes of the variables that a checkpoint fills; None if they make no Vision Transformer.

    Args:
        shapes: path of a variable → shape in the model's layout.
        prefix_rows: rows of the position table before its grid.
        num_heads: of the blocks, when it is known.
        numerics: of the weights; a hybrid's stem has some of its own.
        grid: of the position table, if it is known. Default: the square that fits.
    """
    blocks = {int(found[1]) for found in map(_BLOCK.fullmatch, shapes) if found}
    embedding = _shape(shapes, "embedding/kernel", 4)
    query = _shape(shapes, f"Transformer_encoderblock_0/{ATTENTION}/query/kernel", 2)
    mlp = _shape(shapes, "Transformer_encoderblock_0/MlpBlock_0/Dense_0/kernel", 2)
    if not (blocks and embedding and query and mlp):
        return None
    positions = _shape(shapes, POSITIONS, 3)
    head, pre_logits = _shape(shapes, "head/kernel", 2), _shape(shapes, "pre_logits/kernel", 2)
    root = _shape(shapes, "conv_root/kernel", 4)
    registers = _shape(shapes, "registers/registers", 3)
    places = positions[1] - prefix_rows if positions else 0
    return Facts(
        width=embedding[3],
        depth=len(blocks),
        num_heads=num_heads,
        mlp_dim=mlp[1],
        patch_size=(embedding[0], embedding[1]),
        in_channels=root[2] if root else embedding[2],
        stem=_stem(shapes, root[3], numerics) if root else None,
        class_token="class_token/cls" in shapes,
        distillation=_distillation(shapes),
        registers=registers[1] if registers else 0,
        prefix_rows=prefix_rows if positions else 0,
        places=places,
        grid=grid or square_grid(places),
        pooling=_pooling(shapes, embedding[3], head, pre_logits),
        norm_after_pooling="pooled_norm/gamma" in shapes,
        layer_scale="Transformer_encoderblock_0/LayerScale_0/gamma" in shapes,
        qkv_bias=f"Transformer_encoderblock_0/{ATTENTION}/query/bias" in shapes,
        representation_size=pre_logits[1] if pre_logits else None,
        classes=head[1] if head else None,
    )


def _distillation(shapes: Shapes) -> bool | str:
    if "distillation_token/dist" not in shapes:
        return False
    one_head = {"head/kernel", "pre_logits/kernel"} & shapes.keys() and "head_dist/kernel" not in shapes
    return "token" if one_head else True


def _pooling(shapes: Shapes, width: int, head: tuple[int, ...] | None, pre_logits: tuple[int, ...] | None) -> str:
    reads = (pre_logits or head or (width,))[0]
    if "MAPHead_0/probe" in shapes:
        return "map"
    if "class_token/cls" not in shapes or "pooled_norm/gamma" in shapes:
        return "gap"
    return "token_gap" if reads == 2 * width else "token"


def _shape(shapes: Shapes, path: str, ndim: int) -> tuple[int, ...] | None:
    shape = shapes.get(path, ())
    return tuple(shape) if len(shape) == ndim else None


def _stem(shapes: Shapes, root_width: int, numerics: Numerics) -> Stem:
    units = {(int(found[1]), int(found[2])) for found in map(_UNIT.fullmatch, shapes) if found}
    stages = sorted({block for block, _ in units})
    layers = tuple(sum(block == stage for block, _ in units) for stage in stages)
    try:
        return Stem(layers, root_width / 64, **numerics.of_stem())
    except ValueError as error:
        raise CheckpointError(str(error)) from None
