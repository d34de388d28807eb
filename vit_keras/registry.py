"""Where names meet families."""

import dataclasses
import difflib
import fnmatch
from typing import Any

import keras

from vit_keras import catalog, checkpoints, hybrid, vit
from vit_keras.catalog import list_weights
from vit_keras.spec import SIZES, Variant, ViTSpec
from vit_keras.variants import parts_of, takes_grey_as_rgb, variant_spec

FAMILIES = (vit, hybrid)
VARIANTS: dict[str, Variant] = {name: row for family in FAMILIES for name, row in family.VARIANTS.items()}
PARAMETERS: dict[str, int] = {name: count for family in FAMILIES for name, count in family.PARAMETERS.items()}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the published architectures, families in order, small to large.

    Args:
        pattern: shell pattern such as `"vit_b*"`. Default: all.
    """
    return [name for name in VARIANTS if fnmatch.fnmatchcase(name, pattern)]


def spec_of(name: str, /, **options: Any) -> ViTSpec:
    """The checked spec of a published architecture.

    Args:
        name: as `list_models` gives it.
        **options: fields of `vit_keras.spec.ViTSpec` to change.

    Raises:
        ValueError: there is no model of this name; all names are listed.
    """
    return variant_spec(name, _variant(name), **options)


def create(name: str, /, **options: Any) -> keras.Model:
    """Build a published architecture by name, with a published set of weights.

    ```python
    model = create("vit_b16.augreg_in21k_ft_in1k_384", classes=37)
    ```

    Args:
        name: as `list_models` gives it: `create("vit_b16", ...)` is `vit.vit_b16(...)`; or as `list_weights` does,
            `variant.tag`: the variant with those weights, at the size they were trained at.
        **options: arguments of the constructor, see `vit_keras.vit.vit_b16`. With `variant.tag`, `classes` asks for a
            new head of that many classes.

    Raises:
        ValueError: there is no model or no weights of this name.
        vit_keras.checkpoints.DownloadError: the weights could not be fetched.
    """
    variant, _, tag = name.partition(".")
    _variant(variant)
    if tag:
        row = catalog.find(variant, name if name in catalog.ROWS else tag)
        if "weights" in options:
            raise ValueError(f"{name!r} names its weights already. Received: weights={options['weights']!r}")
        if "classes" in options:
            options.setdefault("pretrained_top", False)
        elif row.head is None:
            options.setdefault("include_top", False)
        options = {"image_size": row.image_size, "classes": row.classes or 1000, "weights": row.tag, **options}
    family = next(family for family in FAMILIES if variant in family.VARIANTS)
    return getattr(family, variant)(**options)


def _variant(name: str) -> Variant:
    if name not in VARIANTS:
        near = difflib.get_close_matches(name, VARIANTS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no model {name!r}.{hint} Expected one of {', '.join(VARIANTS)}.")
    return VARIANTS[name]


def from_checkpoint(
    source: Any, *, source_grid: Any = None, resize: Any = None, format: str | None = None, **options: Any
) -> keras.Model:
    """Build the model a checkpoint was saved from, whatever its format and size, with its weights.

    ```python
    model = from_checkpoint("my_vit.npz")
    model = from_checkpoint("folder_of_save_pretrained", image_size=384)
    ```

    Args:
        source: path of a checkpoint of a ViT or a hybrid: an `.npz` in the original layout; a `.safetensors` file or a
            folder of timm or Hugging Face; a PyTorch state dict; a preset folder of keras-hub; a `.weights.h5` or
            `.h5` of the old vit-keras; a `.keras` file. Or a mapping from key to array, or a model of this library,
            whose weights are copied.
        source_grid, resize: as in `vit_keras.load_weights_from`.
        format: `"original"`, `"timm"`, `"huggingface"`, `"keras_hub"` or `"vit_keras_legacy"`. None (default)
            recognises it by the keys.
        **options: fields of `vit_keras.spec.ViTSpec` to change, such as `image_size` (default: that of the position
            table, if it is square), `patch_size` (other than the file's: its embedding is resized as in FlexiViT, and
            the image keeps its size), `classes` (a new head, unless the file's has as many), `include_top`, `num_heads`
            (which files of PyTorch do not tell, default: the published size's), or `pooling`, which few files tell
            (default: `"token"` with a class token, `"gap"` without, `"map"` with a MAP head).

    Raises:
        CheckpointError: the file cannot be read, or its image size or number of heads is not known and not given.
        ImportError: the package that reads this kind of file is not installed.
    """
    if isinstance(source, keras.Model):
        checkpoint = checkpoints.checkpoint_of(source)
    elif isinstance(source, checkpoints.Checkpoint):
        checkpoint = source
    else:
        checkpoint = checkpoints.open_checkpoint(source, format, source_grid)
    return build_and_load(checkpoint, source_grid=source_grid, resize=resize, **options)[0]


def build_and_load(
    checkpoint: checkpoints.Checkpoint, *, source_grid: Any = None, resize: Any = None, **options: Any
) -> tuple[keras.Model, checkpoints.LoadReport]:
    """As `from_checkpoint`, of an open checkpoint, with the report of what went where."""
    spec = _spec_of_file(checkpoint, options)
    model = (vit if spec.stem is None else hybrid).build(spec)
    report = checkpoints.load_weights_from(
        model,
        checkpoint,
        top=spec.include_top and spec.classes == checkpoint.facts.classes,
        source_grid=source_grid,
        resize=resize,
        rollback=False,
        resize_patch="patch_size" in options,
    )
    return model, report


def _spec_of_file(checkpoint: checkpoints.Checkpoint, options: dict[str, Any]) -> ViTSpec:
    """The spec of the model that a file was saved from, with changes."""
    facts, native = checkpoint.facts, checkpoint.facts.native_size
    chosen = {**checkpoint.architecture, **options}
    if chosen.get("image_size") is None and "native_size" not in chosen and native is None:
        table = f"a position table of {facts.places} places, which is no square"
        raise checkpoints.CheckpointError(
            f"{checkpoint.name} holds {table if facts.places else 'no position table, which would tell a size'}: "
            f"pass image_size=(height, width){' or source_grid=(height, width)' if facts.places else ''}."
        )
    heads = facts.num_heads or facts.published_heads
    if heads is None and "num_heads" not in options:
        raise checkpoints.CheckpointError(
            f"{checkpoint.name} does not say its number of heads, and {facts.depth} blocks of width {facts.width} are "
            "no published size: pass num_heads=."
        )
    known = {
        "width": facts.width,
        "depth": facts.depth,
        "num_heads": heads,
        "mlp_dim": facts.mlp_dim,
        "patch_size": facts.patch_size,
        "in_channels": facts.in_channels,
        "stem": facts.stem,
        "pooling": facts.pooling,
        "class_token": facts.class_token,
        "class_position": facts.class_position if facts.class_token else None,
        "position": "learned_1d" if facts.places else "none",
        "image_size": native,
        "classes": facts.classes or 1000,
        "include_top": facts.classes is not None or "classes" in options,
        "representation_size": facts.representation_size,
        "gelu": checkpoint.numerics.gelu,
        "epsilon": checkpoint.numerics.epsilon,
        **parts_of(facts),
        **checkpoint.architecture,
    }
    if {**known, **options}["image_size"] is None:
        known["native_size"] = native
    if facts.stem is not None:
        known["stem"] = dataclasses.replace(facts.stem, grey_as_rgb=takes_grey_as_rgb(facts, chosen))
    return ViTSpec.of(**{**known, **options})


__all__ = ["PARAMETERS", "SIZES", "VARIANTS", "create", "from_checkpoint", "list_models", "list_weights", "spec_of"]
