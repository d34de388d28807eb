"""`vit-keras models`: the architectures as a table."""

import json

from rich.console import Console
from rich.table import Table

from vit_keras import analysis, registry

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


def run(pattern: str, as_json: bool) -> None:
    """Print the models that match.

    Raises:
        ValueError: none does.
    """
    found = rows(pattern)
    if not found:
        raise ValueError(f"No model matches {pattern!r}. Without a pattern, all of them are listed.")
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), caption=CAPTION, caption_justify="left")
    for title in COLUMNS.values():
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    for row in found:
        values = (row[key] for key in COLUMNS)
        table.add_row(*(f"{value:,}" if isinstance(value, (int, float)) else value for value in values))
    Console().print(table)
