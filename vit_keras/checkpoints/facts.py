"""What a checkpoint is, told by its keys and shapes alone."""

import dataclasses
import re
from collections.abc import Mapping

from vit_keras.checkpoints.arrays import CheckpointError, Entry
from vit_keras.checkpoints.eras import POSITIONS_KEY
from vit_keras.layers import square_grid
from vit_keras.spec import Stem, size_letter

_BLOCK = re.compile(r"Transformer/encoderblock_(\d{1,4})/.+")
_UNIT = re.compile(r"block(\d{1,4})/unit(\d{1,4})/.+")


@dataclasses.dataclass(frozen=True)
class Facts:
    """The architecture that a checkpoint in the original layout was saved from.

    Args:
        width, depth, num_heads, mlp_dim: of the Transformer.
        patch_size: (height, width), in pixels of the image or of the stem's map.
        in_channels: of the images.
        stem: ResNet stem of a hybrid, or None.
        class_token: whether there is one.
        class_position: whether the class token has a row in the position table.
        map_head: whether the head is attention pooling.
        places: rows of the position table without prefix rows.
        representation_size: width of `pre_logits`, or None.
        classes: of the head, or None without a head.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: tuple[int, int]
    in_channels: int
    stem: Stem | None
    class_token: bool
    class_position: bool
    map_head: bool
    places: int
    representation_size: int | None
    classes: int | None

    @property
    def pooling(self) -> str:
        """The pooling that these parameters belong to; a class token is taken to be read."""
        return "map" if self.map_head else "token" if self.class_token else "gap"

    @property
    def native_size(self) -> tuple[int, int] | None:
        """Image size (height, width) of a square position table, or None when it is not square."""
        grid = square_grid(self.places)
        return grid and self.image_size_of(grid)

    def image_size_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Image size (height, width) whose patches lie on `grid`."""
        stride = self.stem.stride if self.stem else 1
        return grid[0] * self.patch_size[0] * stride, grid[1] * self.patch_size[1] * stride


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


def facts_of(entries: Mapping[str, Entry], prefix_rows: int) -> Facts:
    """Read the facts off entries in today's names.

    Raises:
        CheckpointError: these are not the keys of a Vision Transformer in the original layout.
    """
    blocks = {int(found[1]) for found in map(_BLOCK.fullmatch, entries) if found}
    embedding = _shape(entries, "embedding/kernel", 4)
    query = _shape(entries, "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel", 3)
    mlp = _shape(entries, "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel", 2)
    if not (blocks and embedding and query and mlp):
        raise CheckpointError(f"Not a Vision Transformer in the original JAX layout: {_looks_like(entries)}.")
    positions = _shape(entries, POSITIONS_KEY, 3)
    head, pre_logits = _shape(entries, "head/kernel", 2), _shape(entries, "pre_logits/kernel", 2)
    root = _shape(entries, "conv_root/kernel", 4)
    return Facts(
        width=embedding[3],
        depth=len(blocks),
        num_heads=query[1],
        mlp_dim=mlp[1],
        patch_size=(embedding[0], embedding[1]),
        in_channels=root[2] if root else embedding[2],
        stem=_stem(entries, root[3]) if root else None,
        class_token="cls" in entries,
        class_position="cls" in entries and prefix_rows > 0,
        map_head="MAPHead_0/probe" in entries,
        places=positions[1] - prefix_rows if positions else 0,
        representation_size=pre_logits[1] if pre_logits else None,
        classes=head[1] if head else None,
    )


def _shape(entries: Mapping[str, Entry], key: str, ndim: int) -> tuple[int, ...] | None:
    shape = entries[key].shape if key in entries else ()
    return tuple(shape) if len(shape) == ndim else None


def _stem(entries: Mapping[str, Entry], root_width: int) -> Stem:
    units = {(int(found[1]), int(found[2])) for found in map(_UNIT.fullmatch, entries) if found}
    stages = sorted({block for block, _ in units})
    layers = tuple(sum(block == stage for block, _ in units) for stage in stages)
    return Stem(layers, root_width / 64)


def _looks_like(entries: Mapping[str, Entry]) -> str:
    if not entries:
        return "it holds no arrays"
    if any(key.startswith("MixerBlock_") for key in entries):
        return "these are the keys of an MLP-Mixer"
    if any(key.startswith(("blocks.", "vit.", "model.")) for key in entries):
        return "these are the keys of a PyTorch model"
    return f"its first keys are {', '.join(sorted(entries)[:4])}"
