"""`vit-keras models`: the architectures as a table."""

import json

from rich.console import Console
from rich.table import Table

from vit_keras import analysis, registry


def rows(pattern: str) -> list[dict]:
    """One record a model: its parameters are counted at 224 pixels, its operations at its own image size too."""
    result = []
    for name in registry.list_models(pattern):
        spec, at_224 = registry.spec_of(name), registry.spec_of(name, image_size=224)
        row = {
            "model": name,
            "patch": spec.patch_size[0],
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
    table = Table(
        caption="Parameters: 224 pixels, 1,000 classes. GFLOPs: 2 x multiply-adds of one image.\n"
        "Patch: in pixels of the image, or of the ResNet stem's map for hybrids (r_…).",
        caption_justify="left",
    )
    titles = ("model", "patch", "width", "blocks", "heads", "MLP", "parameters", "GFLOPs @224", "size", "GFLOPs @size")
    for title in titles:
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=title != "model")
    for row in found:
        table.add_row(*(f"{value:,}" if isinstance(value, (int, float)) else value for value in row.values()))
    Console().print(table)
