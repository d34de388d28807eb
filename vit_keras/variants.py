"""From a line of a family's `VARIANTS` to its constructor: old arguments kept, and what a file of weights decides."""

import contextlib
import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable
from importlib import resources
from typing import Any

import keras

from vit_keras import catalog, checkpoints
from vit_keras.layers import square_grid
from vit_keras.spec import READ_THE_CLASS_TOKEN, SIZES, Stem, Variant, ViTSpec

SUFFIXES = (".npz", ".keras", ".safetensors", ".h5", ".pt", ".pth", ".bin")
EMBEDDED = resources.files("vit_keras") / "assets"


def constructor(variant_name: str, variant: Variant, build: Callable[[ViTSpec], keras.Model]) -> Callable:
    """The function `vit_b16(...)` and its like, made from a line of `VARIANTS`."""

    def construct(
        image_size: Any = variant.image_size,
        classes: int = variant.classes,
        activation: Any = "linear",
        include_top: bool = True,
        pretrained: bool = True,
        pretrained_top: bool = True,
        weights: Any = variant.weights,
        source_grid: Any = None,
        resize: Any = None,
        **options: Any,
    ) -> keras.Model:
        options = {**options, "image_size": image_size, "activation": activation, "include_top": include_top}
        if not pretrained:
            if has_pre_logits(variant_name, weights) and options.get("representation_size") is None:
                options["representation_size"] = SIZES[variant.size].width
            return build(variant_spec(variant_name, variant, classes=classes, **options))
        variant_spec(variant_name, variant, classes=classes, **options)  # tells a wrong argument before a download
        source = open_weights(variant_name, weights)
        load_top = include_top and pretrained_top
        if load_top:
            classes = classes_of(source, classes)
        spec = variant_spec(variant_name, variant, classes=classes, **fill_from(source, options))
        model = build(spec)
        checkpoints.load_weights_from(
            model, source, top=load_top, source_grid=source_grid, resize=resize, rollback=False
        )
        return model

    construct.__name__ = construct.__qualname__ = variant_name
    construct.__doc__ = _DOCUMENTATION.format(name=variant_name, variant=variant, size=SIZES[variant.size])
    construct.__signature__ = inspect.signature(construct)  # type: ignore[attr-defined]
    return construct


_DOCUMENTATION = """{name}: {size.depth} blocks, width {size.width}, {size.num_heads} heads, patch {variant.patch_size}.

Args:
    image_size: an integer, a pair (height, width), or None for any size at call time. Default {variant.image_size}.
    classes: outputs of the head. Default {variant.classes}.
    activation: of the head. Default `"linear"`.
    include_top: whether the head is built. Default True.
    pretrained: whether `weights` are loaded. Default True.
    pretrained_top: whether they include the head; False leaves it new. Ignored without head or pretrained.
    weights: what `vit_keras.list_weights("{name}.*")` lists, with or without "{name}."; `"imagenet21k+imagenet2012"` or
        `"imagenet21k"`; `"augreg/<file name>.npz"` for any AugReg file; an address; or the path of a checkpoint in any
        format that `vit_keras.from_checkpoint` reads. What is not on this machine is fetched into the cache. Position
        embeddings are resized to the image size. Default `"{variant.weights}"`.
    source_grid, resize: of the weights' position table, as in `vit_keras.load_weights_from`.
    **options: further arguments of `vit_keras.vit.build_model`. What the weights decide (`representation_size`,
        `class_position`, `native_size`, `gelu`, `epsilon`) is taken from them unless given.

Returns:
    A functional `keras.Model`: (B, H, W, 3) -> (B, classes).

Raises:
    ValueError: an argument is out of its range, there are no such weights, or a path is given with `pretrained=False`.
    vit_keras.checkpoints.DownloadError: the weights could not be fetched.
    vit_keras.checkpoints.CheckpointError: the file does not fit the model; no weight was changed.
"""


def variant_spec(variant_name: str, variant: Variant, **options: Any) -> ViTSpec:
    """The spec of a published model, with changes."""
    size = SIZES[variant.size]
    stage = options.pop("stage", variant.stage)
    stem_options = {"grey_as_rgb": options.pop("grey_as_rgb", False), **options.pop("stem_numerics", {})}
    stem = None
    if variant.stem_layers is None and stage is not None:
        raise ValueError(f"`stage` belongs to hybrids; {variant_name} has no ResNet stem. Received: stage={stage!r}")
    if variant.stem_layers is not None:
        stem = Stem(merge_stages(variant.stem_layers, stage), **stem_options)
    options = {"image_size": variant.image_size, "stem": stem, "name": variant_name.replace("_", "-"), **options}
    return ViTSpec.of(**size._asdict(), patch_size=(variant.patch_size, variant.patch_size), **options)


def merge_stages(stem_layers: tuple[int, ...], stage: int | None) -> tuple[int, ...]:
    """Units per stage when `stage` is the last: with 3, the fourth stage's units join the third (section 4.1)."""
    if stage not in (None, 3, 4) or (stage is not None and len(stem_layers) != 4):
        raise ValueError(
            f"`stage` must be 3 or 4, for a stem of four stages, or None. Received: stage={stage!r}, with "
            f"{len(stem_layers)} stages"
        )
    if stage == 3:
        return (*stem_layers[:2], stem_layers[2] + stem_layers[3])
    return stem_layers


def open_weights(variant_name: str, weights: Any) -> checkpoints.Checkpoint:
    """Open what `weights` means for a variant: a name of the catalog, an address, or a path. Fetches it if need be.

    Raises:
        ValueError: it is none of these.
        checkpoints.CheckpointError: the file cannot be fetched or read.
    """
    if not isinstance(weights, (str, os.PathLike)):
        raise ValueError(
            f"`weights` must be a name or the path of a checkpoint. Received: {type(weights).__name__}. "
            "For arrays in memory, build with pretrained=False and call vit_keras.load_weights_from."
        )
    weights = os.fspath(weights)
    if not is_path(variant_name, weights):
        return open_row(catalog.find(variant_name, weights))
    if "://" in weights:
        return checkpoints.open_checkpoint(checkpoints.fetch(weights))
    source = checkpoints.open_checkpoint(weights)
    with contextlib.suppress(ValueError):  # a file of AugReg says in its name what its classes are
        return dataclasses.replace(source, labels=catalog.augreg_row(source.name).labels)
    return source


def open_row(row: catalog.Row) -> checkpoints.Checkpoint:
    """Open the checkpoint of a row of the catalog, with what the row says of it. Fetches it if need be."""
    path = str(EMBEDDED / row.url) if row.embedded else checkpoints.fetch(row.url)
    source = checkpoints.open_checkpoint(path)
    published_so = source.facts.native_size == (row.image_size, row.image_size)
    return dataclasses.replace(
        source,
        name=row.name,
        numerics=dataclasses.replace(source.numerics, gelu=row.gelu, epsilon=row.epsilon),
        resize=row.resize,
        source_grid=square_grid(source.facts.places) if published_so else None,
        labels=row.labels,
        preprocessing=row.preprocessing,
    )


def is_path(variant_name: str, weights: str) -> bool:
    """Whether `weights` is meant as a path or an address: a name that the catalog knows wins over a file called so."""
    if catalog.knows(variant_name, weights):
        return False
    return "://" in weights or os.sep in weights or weights.endswith(SUFFIXES) or os.path.exists(weights)


def has_pre_logits(variant_name: str, weights: Any) -> bool:
    """Whether the weights of this name have a `pre_logits` layer; refuses a path, which would not be loaded."""
    if weights is None:
        return False
    if not isinstance(weights, str) or is_path(variant_name, weights):
        raise ValueError(f"weights={weights!r} is given together with pretrained=False: leave one of them out.")
    try:
        return catalog.find(variant_name, weights).pre_logits
    except ValueError:
        if weights in catalog.NAMED_WEIGHTS:  # the default, of a variant without published weights
            return False
        raise


def classes_of(source: checkpoints.Checkpoint, classes: int) -> int:
    """Number of classes of the source's head; warns, as the old vit-keras did, when it is not what was asked for."""
    found = source.facts.classes
    if found is None:
        raise checkpoints.CheckpointError(
            f"{source.name} holds no head: pass pretrained_top=False for a new one, or include_top=False for none."
        )
    if found != classes:
        warnings.warn(
            f"Can only use pretrained_top with {source.name} if classes = {found}. Setting manually.", UserWarning, 3
        )
    return found


def fill_from(source: checkpoints.Checkpoint, options: dict) -> dict:
    """Options left open are decided by the weights."""
    facts = source.facts
    known: dict[str, Any] = {
        "representation_size": facts.representation_size,
        "gelu": source.numerics.gelu,
        "epsilon": source.numerics.epsilon,
        "stem_numerics": source.numerics.of_stem(),
        **parts_of(facts),
    }
    if not {"pooling", "class_token"} & options.keys():
        known |= {"pooling": facts.pooling, "class_token": facts.class_token}
    if options["image_size"] is None:
        known["native_size"] = facts.native_size
    if takes_grey_as_rgb(facts, options):
        known["grey_as_rgb"] = True
    # Otherwise a model without class token or table would be refused for a row that nobody asked for.
    has_class_token = options.get("class_token", options.get("pooling", facts.pooling) in READ_THE_CLASS_TOKEN)
    if facts.class_token and has_class_token and options.get("position", "learned_1d") == "learned_1d":
        known["class_position"] = facts.class_position
    given = {name: value for name, value in options.items() if value is not None or name not in known}
    return {**known, **given}


def parts_of(facts: checkpoints.Facts) -> dict[str, Any]:
    """Arguments of `vit_keras.vit.build_model` for parts that not every Vision Transformer has."""
    return {
        "distillation": facts.distillation,
        "registers": facts.registers,
        "layer_scale": 1e-5 if facts.layer_scale else None,
        "qkv_bias": facts.qkv_bias,
        "norm_after_pooling": facts.norm_after_pooling,
    }


def takes_grey_as_rgb(facts: checkpoints.Facts, options: dict) -> bool:
    """Whether a stem trained on RGB must see grey images as RGB.

    A plain patch embedding sums its kernel over RGB and gives the same tokens; a weight-standardised kernel cannot,
    since standardising undoes the sum's scale.
    """
    return facts.stem is not None and facts.in_channels == 3 and options.get("in_channels") == 1
