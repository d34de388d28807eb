"""`vit-keras models`: the architectures, or the published weights, as a table."""

import dataclasses
import json

from vit_keras import analysis, catalog, registry
from vit_keras_cli import print_table

COLUMNS = {
    "model": "model",
    "size": "size",
    "patch": "patch",
    "parameters": "parameters",
    "gflops_224": "GFLOPs@224",
    "image_size": "pixels",
    "gflops": "GFLOPs",
}
CAPTION = """
Parameters at 224 pixels with 1,000 classes. GFLOPs: 2 x multiply-adds of
one image, at 224 pixels and at the model's default size in pixels.
Patch: in pixels of the image, or of a hybrid's ResNet map."""


def rows(pattern: str) -> list[dict]:
    """One record a model: its parameters are counted at 224 pixels, its operations at its own image size too."""
    result = []
    for name in registry.list_models(pattern):
        spec, at_224 = registry.spec_of(name), registry.spec_of(name, image_size=224)
        row = {
            "model": name,
            "size": registry.VARIANTS[name].size,
            "patch": registry.VARIANTS[name].patch_size,
            "width": spec.width,
            "blocks": spec.depth,
            "heads": spec.num_heads,
            "mlp": spec.mlp_dim,
            "parameters": registry.PARAMETERS[name],
            "gflops_224": round(analysis.flops(at_224) / 1e9, 1),
            "image_size": registry.VARIANTS[name].image_size,
            "gflops": round(analysis.flops(spec) / 1e9, 1),
        }
        result.append(row)
    return result


WEIGHTS = ("weights", "pixels", "labels", "head", "MiB", "top-1 %")
WEIGHTS_PAGE = """# Published weights

<!-- Generated: vit-keras models --weights --markdown > docs/weights.md -->

```python
import vit_keras

names = vit_keras.list_weights("vit_b*.augreg*384")
row = vit_keras.catalog.ROWS[names[0]]
```

`vit_keras.create("NAME")` builds the model of a row at its size, `vit_keras.Predictor("NAME")` predicts with it, and
`weights="NAME"` loads it in a constructor at any size. The pixels that they expect are in the row.

Labels: `vit_keras.labels.load("LABELS")`. Head "zero": the heads of the original ImageNet-21k weights were not
released; these are for fine-tuning. MiB: of the file, as precisely as its publisher prints it. Top-1: on the ImageNet
validation images (Fashion-MNIST: test images), as reported for this very file by the README of
google-research/vision_transformer ([vit_mini](vit_mini.md): by its card). What nobody states is left empty.

The names say what the weights are: `orig` Dosovitskiy et al. 2021 (arXiv 2010.11929), `augreg` Steiner et al. 2022
(arXiv 2106.10270), `sam` Chen et al. 2022 (arXiv 2106.01548); `in21k` trained on ImageNet-21k, `ft_in1k` then
fine-tuned on ImageNet-1k; the size in pixels at the end. `augreg_in21k_ft_in1k` are the files that timm names so,
`augreg_recommended` those of the README where they are others; `augreg_in21k` are the README's recommended
pre-trainings, which for S/32, B/32, B/8, L/16, R26+S/32 and R50+L/32 are other files than timm's. `deit` Touvron et al.
2021 (arXiv 2012.12877), `deit_distilled` with their distillation token, `dino` Caron et al. 2021 (arXiv 2104.14294),
`mae` He et al. 2022 (arXiv 2111.06377, CC-BY-NC-4.0): timm's copies on the Hugging Face hub, in timm's layout.
`hf_orig` are Hugging Face's copies of the original files, which its library computes with the exact GELU.
"""


def weights_rows(pattern: str) -> list[catalog.Row]:
    """The rows of the catalog whose name matches."""
    return [catalog.ROWS[name] for name in catalog.list_weights(pattern)]


def weights_cells(row: catalog.Row) -> tuple[str, ...]:
    """What a table shows of a row."""
    size = "" if row.size is None else f"{row.size / catalog.MIB:,.1f}"
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f}"
    return row.name, str(row.image_size), row.labels or "", row.head or "", size, accuracy


def weights_page() -> str:
    """`docs/weights.md`."""
    lines = [f"| {' | '.join(WEIGHTS)} | file |", f"|{'---|' * (len(WEIGHTS) + 1)}"]
    for row in weights_rows("*"):
        name, *cells = weights_cells(row)
        where = "in this package" if row.embedded else f"[{row.url.rpartition('/')[2]}]({row.url})"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {where} |")
    return f"{WEIGHTS_PAGE}\n" + "\n".join(lines)


def run(pattern: str, weights: bool, output: str) -> None:
    """Print the models, or the weights, that match, as `"table"`, `"json"` or (weights) `"markdown"`.

    Raises:
        ValueError: none does.
    """
    published = weights_rows(pattern) if weights else []
    found = [dict(name=row.name, **dataclasses.asdict(row)) for row in published] if weights else rows(pattern)
    if not found:
        what = "weights match" if weights else "model matches"
        raise ValueError(f"No {what} {pattern!r}. Without a pattern, all of them are listed.")
    if output == "markdown":
        print(weights_page())
    elif output == "json":
        print(json.dumps(found, indent=1))
    elif weights:
        print_table(WEIGHTS, map(weights_cells, published), right={"pixels", "MiB", "top-1 %"})
    else:
        values = ((row[key] for key in COLUMNS) for row in found)
        cells = ([f"{v:,}" if isinstance(v, (int, float)) else v for v in row] for row in values)
        print_table(COLUMNS.values(), cells, right=set(COLUMNS.values()) - {"model"}, caption=CAPTION)
