"""Weights from foreign checkpoints into models and back."""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from vit_keras.checkpoints import rules
from vit_keras.checkpoints.arrays import CheckpointError, Entry
from vit_keras.checkpoints.facts import Facts, describe
from vit_keras.checkpoints.model import facts_of_model, numerics_by_layer
from vit_keras.checkpoints.source import Checkpoint, open_checkpoint
from vit_keras.checkpoints.transforms import Context, Target, resolve_grid
from vit_keras.checks import as_choice, as_pair
from vit_keras.layers import GridTables, Patches, walk
from vit_keras.records import Numerics, Resize, Weights


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Args:
        source: name of the file.
        loaded: path of each filled variable → key of the array.
        dropped: keys of arrays that were left out on purpose.
        kept: paths of variables that keep their initial values.
        source_grid, grid: of the position table in the file and in the model, (height, width); None without a table.
        channels: input channels of the file's stem and of the model's.
        patch_size: (height, width) of the file's patches and of the model's.
    """

    source: str
    loaded: dict[str, str]
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    channels: tuple[int, int] = (3, 3)
    patch_size: tuple[tuple[int, int], tuple[int, int]] = ((16, 16), (16, 16))
    source_grid: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None

    def changes(self) -> list[str]:
        """What was done to arrays that did not fit as they are, one sentence each."""
        lines = []
        if self.source_grid != self.grid:
            lines.append(f"position embeddings resized from {self.source_grid} to {self.grid}")
        if self.patch_size[0] != self.patch_size[1]:
            lines.append(f"the patch embedding resized from {self.patch_size[0]} to {self.patch_size[1]} pixels")
        if self.channels[0] != self.channels[1]:
            lines.append(f"the first kernel adapted from {self.channels[0]} to {self.channels[1]} input channels")
        return lines

    def __str__(self):
        lines = [f"{self.source}: {len(self.loaded)} arrays loaded", *self.changes()]
        if self.dropped:
            lines.append("left out: " + ", ".join(self.dropped))
        if self.kept:
            lines.append("left as they were: " + ", ".join(self.kept))
        return "; ".join(lines)


def load_weights_from(
    model: keras.Model,
    source: str | os.PathLike | Mapping[str, Any] | Checkpoint,
    *,
    top: bool | str = "if_fits",
    resize: Resize | str | None = None,
    source_grid: Any = None,
    numerics: str = "match",
    rollback: bool = True,
    format: str | None = None,
    resize_patch: bool = False,
) -> LoadReport:
    """Load a checkpoint of any known format and era into a model.

    Everything is checked before the first variable changes: each array is claimed once, each variable filled once,
    shapes agree, values are finite. A failed load leaves the model as it was.

    ```python
    report = load_weights_from(model, "ViT-B_16.npz", top=False)
    ```

    Args:
        model: a model with one Vision Transformer of this library in it, alone or nested.
        source: path of a file (`.keras` files are such), of a folder with weights and `config.json`, or a mapping from
            key to array.
        top: False never loads the head; `"if_fits"` (default) loads it when shapes agree and else keeps the initial
            one with a warning; True insists.
        resize: rule for position tables of another grid. None (default) takes the format's own; others:
            `"align_corners"`, `"bicubic"`, `"antialiased_bicubic"`, or a `vit_keras.records.Resize`.
        source_grid: (height, width) of the stored position table. None (default): the square if its rows form one,
            else the model's own grid if the counts agree.
        numerics: `"match"` (default) refuses a model whose GELU or epsilon is not the source's; `"keep"` loads.
        rollback: whether old values are kept until the end, so that a file that fails while it is read changes nothing
            (default). False saves that memory, for a model that is thrown away then.
        format: `"original"`, `"timm"`, `"huggingface"` … None (default) recognises it by the keys.
        resize_patch: whether an embedding of another patch size is resized (FlexiViT's pseudo-inverse) instead of
            being refused. Default False.

    Returns:
        A `LoadReport`.

    Raises:
        CheckpointError: the source cannot be read or does not fit; one message lists everything that is wrong.

    Reference: big_vision `models/common.py`, `merge_params`, for the strictness; vision_transformer `checkpoint.py`,
        `load_pretrained`, for what is loaded.
    """
    # 1 == True, but is not what a flag looks like.
    as_choice(top if isinstance(top, (bool, np.bool_, str)) else repr(top), "top", (True, False, "if_fits"))
    top = top if isinstance(top, str) else bool(top)
    as_choice(numerics, "numerics", ("match", "keep"))
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, format, source_grid)
    backbone = rules.find_backbone(model)
    context = Context(
        checkpoint.resize if resize is None else Resize.of(resize),
        checkpoint.facts.prefix_rows,
        checkpoint.source_grid if source_grid is None else as_pair(source_grid, "source_grid"),
        resize_patch,
    )
    try:
        if numerics == "match":
            _check_numerics(backbone, checkpoint.numerics)
        entries, targets = _select_top(checkpoint, rules.collect_targets(backbone), top)
        assignments = rules.match(checkpoint.format.rules, entries, targets, context)
        _check_facts(checkpoint, facts_of_model(backbone), any(path.startswith(HEADS) for path in targets))
        _check_values(assignments, context, checkpoint.name)
        # Before the first change: where warnings are errors, this too can end the load.
        report = _report(checkpoint, backbone, assignments, context)
        rules.apply(assignments, context, rollback)
    except CheckpointError as error:
        raise CheckpointError(_explain(error, checkpoint, backbone)) from None
    _keep_record(backbone, checkpoint, report, context.resize)
    return report


def _check_numerics(backbone: keras.Model, numerics: Numerics) -> None:
    ours = numerics_by_layer(backbone)
    for name, theirs in dataclasses.asdict(numerics).items():
        for layer, value in ours.get(name, ()):
            if value != theirs if isinstance(theirs, (str, bool)) else not math.isclose(value, theirs, rel_tol=1e-6):
                raise CheckpointError(
                    f"the weights were trained with gelu={numerics.gelu!r} and epsilon={numerics.epsilon}, the model's "
                    f"{layer} has {name}={value!r} where they have {theirs!r}: build it with theirs, or pass "
                    "numerics='keep' to load_weights_from"
                )


def _check_facts(checkpoint: Checkpoint, ours: Facts, with_head: bool) -> None:
    """What no array's shape shows, where the file says it."""
    theirs = checkpoint.facts
    if theirs.num_heads is not None and theirs.num_heads != ours.num_heads:
        raise CheckpointError(
            f"the weights were trained with {theirs.num_heads} attention heads, the model has {ours.num_heads}: build "
            f"it with num_heads={theirs.num_heads}"
        )
    if checkpoint.says_pooling and with_head and theirs.pooling != ours.pooling:
        raise CheckpointError(
            f"the file's head reads pooling={theirs.pooling!r}, the model's {ours.pooling!r}: build it with that, or "
            "pass top=False"
        )


HEADS = ("head/", "head_dist/")
OURS = {"head", "head_dist", "pre_logits", "Transformer_encoder_norm", "pooled_norm", "gn_root"}


def _select_top(
    checkpoint: Checkpoint, targets: Mapping[str, Target], top: bool | str
) -> tuple[dict[str, Entry], dict[str, Target]]:
    """Without what stays out: a head that is not loaded, and the `pre_logits` that only the file has with it."""
    fills = {key: rules.shapes_of(checkpoint.format.rules, {key: entry}) for key, entry in checkpoint.entries.items()}
    file_head = {path: shape for shapes in fills.values() for path, shape in shapes.items() if path.startswith(HEADS)}
    model_head = {path: target.shape for path, target in targets.items() if path.startswith(HEADS)}
    load = top is True or (top == "if_fits" and bool(model_head) and file_head == model_head)
    if top == "if_fits" and not load and model_head:
        warnings.warn(
            f"The head was not loaded and keeps its initial values: the file has {file_head or 'none'}, the model "
            f"{model_head}.",
            stacklevel=3,
        )
    if load:
        return dict(checkpoint.entries), dict(targets)
    skip_pre_logits = not any(path.startswith("pre_logits/") for path in targets)
    skipped = (*HEADS, "pre_logits/") if skip_pre_logits else HEADS
    return (
        {key: entry for key, entry in checkpoint.entries.items() if not any(p.startswith(skipped) for p in fills[key])},
        {path: target for path, target in targets.items() if not path.startswith(HEADS) and not _is_users(target)},
    )


def _is_users(target: Target) -> bool:
    """Whether a variable belongs to what a user put on top in place of the head."""
    return not type(target.layer).__module__.startswith("vit_keras.") and target.layer.name not in OURS


def _check_values(assignments: list[rules.Assignment], context: Context, name: str) -> None:
    """Read every array once and let it go, so that a broken one is found before the model changes."""
    problems = []
    for assignment in assignments:
        try:
            value = assignment.value(context)
        except CheckpointError as error:
            problems.append(f" ~ {error}")
            continue
        if assignment.target.path == "head/kernel" and not value.any():
            warnings.warn(
                f"{name}: the head is all zeros, as in the released imagenet21k files: every class gets the same "
                "logit. Use these weights for fine-tuning only.",
                stacklevel=3,
            )
    if problems:
        raise CheckpointError("\n".join(problems))


def _explain(error: CheckpointError, checkpoint: Checkpoint, backbone: keras.Model) -> str:
    """The error under a heading that names both architectures when they differ."""
    facts = checkpoint.facts
    theirs = describe(facts.width, facts.depth, facts.patch_size, facts.stem)
    model = facts_of_model(backbone)
    ours = describe(model.width, model.depth, model.patch_size, model.stem)
    lines = [f"{checkpoint.name} does not fit model {backbone.name!r}; nothing was loaded."]
    if theirs != ours:
        name = theirs.rpartition(": ")[2]
        known = f"this is {name}" if ": " in theirs else "no published size"
        lines.append(f"The file holds {theirs.partition(': ')[0]}: {known}. The model has {ours}.")
    if facts.map_head or not facts.class_token:
        lines.append(f"The file's head belongs to pooling={facts.pooling!r}.")
    return "\n".join([*lines, str(error)])


def _report(
    checkpoint: Checkpoint, backbone: keras.Model, assignments: list[rules.Assignment], context: Context
) -> LoadReport:
    loaded = {assignment.target.path: assignment.key for assignment in assignments}
    table = next((layer for layer in walk(backbone) if isinstance(layer, GridTables) and layer.weights), None)
    grid = source_grid = None
    if table:
        grid, places = table.grid, checkpoint.facts.places
        source_grid = resolve_grid(places, grid, context.source_grid) if places else context.source_grid
        if context.source_grid is None and source_grid != grid and grid[0] != grid[1]:
            warnings.warn(
                f"Position embeddings: the file does not say the grid of its {checkpoint.facts.places} places; taken "
                f"as the square {source_grid} and resized to {grid}. Pass source_grid=(height, width) if that is "
                "wrong.",
                stacklevel=3,
            )
    return LoadReport(
        checkpoint.name,
        loaded,
        dropped=(*sorted(checkpoint.entries.keys() - set(loaded.values())), *checkpoint.left_out),
        kept=tuple(sorted(rules.collect_targets(backbone).keys() - loaded.keys())),
        source_grid=source_grid,
        grid=grid,
        channels=(checkpoint.facts.in_channels, _in_channels(assignments)),
        patch_size=(checkpoint.facts.patch_size, backbone.get_layer("embedding").patch_size),
    )


def _in_channels(assignments: list[rules.Assignment]) -> int:
    """Channels of the images that a model's first kernel takes."""
    kernels = {assignment.target.path: assignment.target for assignment in assignments}
    return kernels.get("conv_root/kernel", kernels["embedding/kernel"]).shape[2]


def _keep_record(backbone: keras.Model, checkpoint: Checkpoint, report: LoadReport, resize: Resize) -> None:
    """Leave in the model what its weights are, and in its tables the rule by which they are resized."""
    has_head = "head/kernel" in report.loaded
    for layer in walk(backbone):
        if isinstance(layer, GridTables):
            layer.resize = resize
        if isinstance(layer, Patches):
            layer.record = Weights(
                source=checkpoint.name,
                format=checkpoint.format.name,
                gelu=checkpoint.numerics.gelu,
                epsilon=checkpoint.numerics.epsilon,
                resize=resize,
                source_grid=report.source_grid,
                grid=report.grid,
                preprocessing=checkpoint.preprocessing,
                labels=checkpoint.labels if has_head else None,
                head=has_head,
            ).to_dict()
