"""A progress bar on standard error where that is a terminal, and nothing where it is not. Imports no Keras."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

COUNTS: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeRemainingColumn())
BYTES: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, completed: int = 0, columns: tuple[ProgressColumn, ...] = COUNTS
) -> Iterator[Callable[[int], None]]:
    """Show how far something is; yields the function that is told of each further step or piece."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    # Rich prints above its bar what goes to the terminal; output that goes elsewhere is none of its business.
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=console, redirect_stdout=sys.stdout.isatty()
    ) as progress:
        task = progress.add_task(description, total=total, completed=completed)
        yield lambda count: progress.advance(task, count)
