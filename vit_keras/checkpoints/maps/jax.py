"""The original JAX code's checkpoints: google-research/vision_transformer and big_vision, ViT and hybrids.

Keys are those the current code saves; `eras` brings the older and newer layouts to them.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from vit_keras.checkpoints import eras
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.eras import POSITIONS_KEY, TOP_LEVEL_POSITIONS_KEY
from vit_keras.checkpoints.facts import ATTENTION, POSITIONS, Facts
from vit_keras.checkpoints.format import Entries, Format, PrefixRows, Written, numerics_reasons
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL, SAME, SPLIT_FIRST, SPLIT_LAST, Transform
from vit_keras.checkpoints.transforms import POSITIONS as TABLE
from vit_keras.layers import square_grid
from vit_keras.records import ALIGN_CORNERS, ORIGINAL, Numerics, Weights


def norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}/scale", f"{target}/gamma"), Rule(f"{source}/bias", f"{target}/beta")


def dense(source: str, target: str, kernel: Transform = SAME, bias: Transform = SAME) -> tuple[Rule, Rule]:
    return Rule(f"{source}/kernel", f"{target}/kernel", kernel), Rule(f"{source}/bias", f"{target}/bias", bias)


def attention_and_mlp(source: str, target: str) -> tuple[Rule, ...]:
    return (
        *(
            rule
            for name in ("query", "key", "value")
            for rule in dense(f"{source}/{ATTENTION}/{name}", f"{target}/{ATTENTION}/{name}", SPLIT_LAST, SPLIT_LAST)
        ),
        *dense(f"{source}/{ATTENTION}/out", f"{target}/{ATTENTION}/out", SPLIT_FIRST),
        *dense(f"{source}/MlpBlock_0/Dense_0", f"{target}/MlpBlock_0/Dense_0"),
        *dense(f"{source}/MlpBlock_0/Dense_1", f"{target}/MlpBlock_0/Dense_1"),
    )


def convolution(source: str, target: str, index: str) -> tuple[Rule, ...]:
    kernel = Rule(f"{source}/conv{index}/kernel", f"{target}/conv{index}/kernel")
    return kernel, *norm(f"{source}/gn{index}", f"{target}/gn{index}")


BLOCK = ("Transformer/encoderblock_{i}", "Transformer_encoderblock_{i}")
UNIT = ("block{b}/unit{u}", "block{b}_unit{u}")

RULES = (
    Rule("conv_root/kernel", "conv_root/kernel", FIRST_KERNEL),
    *norm("gn_root", "gn_root"),
    *convolution(*UNIT, "1"),
    *convolution(*UNIT, "2"),
    *convolution(*UNIT, "3"),
    *convolution(*UNIT, "_proj"),
    *dense("embedding", "embedding", FIRST_KERNEL),
    Rule("cls", "class_token/cls"),
    Rule(POSITIONS_KEY, POSITIONS, TABLE),
    Rule(TOP_LEVEL_POSITIONS_KEY, POSITIONS, TABLE),
    *norm(f"{BLOCK[0]}/LayerNorm_0", f"{BLOCK[1]}/LayerNorm_0"),
    *norm(f"{BLOCK[0]}/LayerNorm_1", f"{BLOCK[1]}/LayerNorm_1"),
    *attention_and_mlp(*BLOCK),
    *norm("Transformer/encoder_norm", "Transformer_encoder_norm"),
    Rule("MAPHead_0/probe", "MAPHead_0/probe"),
    *norm("MAPHead_0/LayerNorm_0", "MAPHead_0/LayerNorm_0"),
    *attention_and_mlp("MAPHead_0", "MAPHead_0"),
    *dense("pre_logits", "pre_logits"),
    *dense("head", "head"),
)


def recognises(keys: Collection[str]) -> bool:
    return any(key.startswith("Transformer/") or "/Transformer/" in key for key in keys)


def canonical(entries: Entries, config: Mapping[str, Any]) -> tuple[Entries, tuple[str, ...]]:
    entries, left_out = eras.strip_training_state(entries)
    if TOP_LEVEL_POSITIONS_KEY in entries and POSITIONS_KEY in entries:
        raise CheckpointError(f"The file holds two position tables: {TOP_LEVEL_POSITIONS_KEY!r}, {POSITIONS_KEY!r}.")
    return eras.squeeze_group_norms(eras.rename_pre_linen(eras.unstack_blocks(entries))), left_out


def prefix_rows(keys: Collection[str]) -> PrefixRows:
    """big_vision's table at the top level has no row for the class token: positions are added before it joins."""
    return PrefixRows((0 if TOP_LEVEL_POSITIONS_KEY in keys or "cls" not in keys else 1,))


_QUERY = re.compile(r".*encoderblock.*/MultiHeadDotProductAttention_[01]/query/kernel")


def heads(entries: Entries) -> int | None:
    """Query kernels are (D, A, d), stacked ones (L, D, A, d), in any era."""
    shape = next((entry.shape for key, entry in entries.items() if _QUERY.fullmatch(key)), ())
    return shape[-2] if len(shape) in (3, 4) else None


def refuse(facts: Facts, numerics: Numerics) -> list[str]:
    reasons = numerics_reasons(numerics, FORMAT.numerics, "the original code, whose files do not say theirs,")
    implied = "map" if facts.map_head else "token" if facts.class_token else "gap"
    if facts.pooling != implied:
        reasons.append(
            f"the original layout does not say pooling={facts.pooling!r}, and its keys would be read as {implied!r}; "
            "vit_keras.save_npz writes them all the same"
        )
    return reasons


def write(entries: Entries, facts: Facts, record: Weights) -> Written:
    square = square_grid(facts.places)
    if square is not None and square != facts.grid:
        warnings.warn(
            f"The original layout does not say that the {facts.places} places of the position table lie on "
            f"{facts.grid} (height, width): pass source_grid={facts.grid} whenever it is read.",
            stacklevel=2,
        )
    return Written(eras.to_released(placed(entries, facts)), {})


def placed(entries: Entries, facts: Facts) -> Entries:
    """The position table where it belongs: without a row for a class token, or with a MAP head, at the top level."""
    without_row = facts.places and not facts.prefix_rows
    return eras.raise_positions(entries) if without_row and (facts.class_token or facts.map_head) else entries


FORMAT = Format(
    name="original",
    family="original",
    title="the original JAX layout",
    rules=RULES,
    numerics=Numerics(),  # flax's nn.gelu is the tanh approximation unless told otherwise
    resize=ALIGN_CORNERS,
    preprocessing=ORIGINAL,
    recognises=recognises,
    canonical=canonical,
    prefix_rows=prefix_rows,
    heads=heads,
    refuse=refuse,
    write=write,
)
