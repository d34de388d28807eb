"""`vit-keras convert`: one checkpoint into another format."""

import contextlib
import sys
import warnings
from typing import Any

import click
from rich.console import Console

from vit_keras import converter


def run(source: str, to: str, out: str, explain: bool, **options: Any) -> None:
    """Convert, and say on standard output what was written, with `explain` also what went where."""
    chosen = {name: value for name, value in options.items() if value not in (None, ())}
    waiting = Console(stderr=True).status(f"Converting {source}") if sys.stderr.isatty() else contextlib.nullcontext()
    with waiting, warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always", UserWarning)
        result = converter.convert(source, to, out, **chosen)
    for warning in noticed:
        if issubclass(warning.category, UserWarning):
            click.echo(f"Note: {warning.message}", err=True)
    if explain:
        click.echo(result.explain())
    click.echo(str(result.report))
    numerics = result.checkpoint.numerics
    click.echo(f"{out}: written as {to}; GELU {numerics.gelu}, LayerNorm epsilon {numerics.epsilon:g}")
