"""The 50,000 checkpoints of "How to train your ViT?", chosen from the index that is published beside them.

Steiner et al. 2022, arXiv 2106.10270; columns of `index.csv`: vision_transformer `vit_jax_augreg.ipynb`.
"""

import csv
from pathlib import Path

from vit_keras import catalog, checkpoints

INDEX = f"{catalog.BUCKET}/augreg/index.csv"
COLUMNS = ("filename", "final_val", "adapt_ds", "adapt_resolution", "adapt_filename", "adapt_final_val", "ds")


def index() -> list[dict[str, str]]:
    """The rows of `index.csv`, fetched into the cache the first time; one row per fine-tuned checkpoint.

    Raises:
        vit_keras.checkpoints.DownloadError: it cannot be fetched.
        vit_keras.checkpoints.CheckpointError: it is not the index.
    """
    with open(checkpoints.fetch(INDEX, _check_index), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _check_index(path: Path) -> None:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            names = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise checkpoints.CheckpointError(f"{path}: not a table ({error})") from error
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise checkpoints.CheckpointError(f"{path}: not the index of AugReg, it has no column {', '.join(missing)}")


def best(variant: str, adapt_ds: str | None = None, resolution: int | None = None, ds: str | None = None) -> str:
    """The best checkpoint of a variant by the accuracy on held-out training data, never the test data.

    ```python
    model = vit_keras.vit.vit_b16(weights=augreg.best("vit_b16", adapt_ds="imagenet2012", resolution=384))
    ```

    Args:
        variant: name of the architecture.
        adapt_ds: data set it was fine-tuned on: `"imagenet2012"`, `"cifar100"`, `"oxford_iiit_pet"`, `"resisc45"` or
            `"kitti"`. None (default): the pre-training itself, by `final_val`.
        resolution: of the fine-tuning, 224 or 384 pixels. Default: either.
        ds: data set of the pre-training: `"i21k"`, `"i21k_30"` or `"i1k"`. Default: any; for a pre-training, `"i21k"`,
            since accuracies on different data do not compare.

    Returns:
        A name for `weights=`, `"augreg/<file name>.npz"`.

    Raises:
        ValueError: nothing in the index is so.
        vit_keras.checkpoints.DownloadError: the index cannot be fetched.
    """
    if adapt_ds is None and resolution is not None:
        raise ValueError(f"`resolution` is one of fine-tuning: pass adapt_ds too. Received: resolution={resolution!r}")
    prefixes = tuple(f"{model}-" for model, name in catalog.AUGREG_MODELS.items() if name == variant)
    wanted = {"ds": ds or (None if adapt_ds else "i21k"), "adapt_ds": adapt_ds, "adapt_resolution": resolution}
    name, score = ("adapt_filename", "adapt_final_val") if adapt_ds else ("filename", "final_val")
    everything = index()
    rows = [
        row
        for row in everything
        if prefixes
        and row["filename"].startswith(prefixes)
        and all(value is None or row[column] == str(value) for column, value in wanted.items())
        and row[score] not in ("", "nan")
    ]
    if not rows:
        asked = ", ".join(f"{column}={value!r}" for column, value in wanted.items() if value is not None)
        data = sorted({row["adapt_ds"] for row in everything})
        raise ValueError(
            f"The index of AugReg has nothing for {variant} with {asked or 'any data'}. It has the models "
            f"{', '.join(catalog.AUGREG_MODELS.values())}, and adapt_ds {', '.join(data)}."
        )
    return f"augreg/{max(rows, key=lambda row: float(row[score]))[name]}.npz"
