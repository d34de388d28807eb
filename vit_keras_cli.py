"""The console command's door: arguments, help and cache tables, without importing Keras until a command needs it.

`import vit_keras` registers every layer with Keras and so takes seconds; this module stands beside the package, so
that `vit-keras --help` does not.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import click


def _run(command: str, **arguments):
    """Import and run a command of `vit_keras.cli`; errors of the user's making become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a file name that the terminal cannot show is no reason to stop
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _without_startup_lines():
            module = importlib.import_module(f"vit_keras.cli.{command}")
        return module.run(**arguments)
    except ImportError as error:  # TensorFlow or an extra is missing, and the message names it
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:  # no room, no right to write
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _without_startup_lines():
    """Keep what TensorFlow says on standard error while it is imported to ourselves, unless the import fails.

    Its C++ code logs before any log level applies. A user who has set TF_CPP_MIN_LOG_LEVEL wants to see it.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def print_table(headings, rows, right=(), caption=None):
    """Print a table at its natural width, so that names stay whole in a pipe and in a narrow terminal."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), caption=caption, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum)
    console.print(table, crop=False, soft_wrap=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vit-keras-zoo")
def main():
    """Vision Transformers for Keras 3 and TensorFlow."""


@main.command(short_help="List the architectures: sizes, parameters, GFLOPs.")
@click.argument("pattern", default="*")
@click.option("--weights", is_flag=True, help="List published weights, by variant.tag, instead of architectures.")
@click.option("--json", "output", flag_value="json", help="Print JSON instead of a table.")
@click.option("--markdown", "output", flag_value="markdown", help="With --weights: print docs/weights.md.")
def models(pattern, weights, output):
    """List the architectures whose name matches PATTERN (such as 'vit_b*'): sizes, parameters, GFLOPs."""
    if output == "markdown" and not weights:
        raise click.UsageError("--markdown goes with --weights.")
    _run("models", pattern=pattern, weights=weights, output=output or "table")


@main.command(short_help="Name what image files show.")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option(
    "--model",
    metavar="NAME",
    help="A published model, as `vit-keras models --weights` lists them; fetched the first time. "
    "Default: vit_s16.augreg_in21k_ft_in1k_224. vit_mini needs no network.",
)
@click.option(
    "--weights", metavar="FILE", help="A .keras model of your own, or a checkpoint that convert reads, instead."
)
@click.option("--labels", metavar="FILE", help="Class names, one a line. Default: those of the weights.")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="Classes per image.")
@click.option(
    "--image-size",
    nargs=2,
    type=click.IntRange(min=1),
    metavar="HEIGHT WIDTH",
    help="Size images are resized to. Default: the model's.",
)
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1), help="Images at a time.")
@click.option("--json", "output", flag_value="json", help="Print one JSON object per image.")
@click.option("--csv", "output", flag_value="csv", help="Print a CSV table, one line per image and class.")
def predict(images, output, **options):
    """Print the most probable classes of each IMAGE: a file (JPEG, PNG and what else Pillow reads), a folder, or a
    pattern such as 'photos/*.jpg'.

    An image that cannot be read is named, the others are predicted all the same, and the exit code is 1.
    """
    raise SystemExit(_run("predict", images=images, output=output or "text", **options))


CHANGES = (
    click.option(
        "--from",
        "format",
        metavar="FORMAT",
        help="Format of SOURCE: original, timm, huggingface, keras_hub, vit_keras_legacy or keras. Default: told by "
        "its keys.",
    ),
    click.option(
        "--image-size", nargs=2, type=click.IntRange(min=1), metavar="HEIGHT WIDTH", help="Default: SOURCE's."
    ),
    click.option("--patch-size", type=click.IntRange(min=1), metavar="PIXELS", help="Default: SOURCE's."),
    click.option(
        "--classes", type=click.IntRange(min=1), help="A head of so many classes; new, unless SOURCE's has as many."
    ),
    click.option("--num-heads", type=click.IntRange(min=1), help="Attention heads, if SOURCE does not tell."),
    click.option(
        "--source-grid",
        nargs=2,
        type=click.IntRange(min=1),
        metavar="HEIGHT WIDTH",
        help="Patches of SOURCE, likewise.",
    ),
    click.option(
        "--remainder", type=click.Choice(["pad", "crop"]), help="For an image that the patch does not divide."
    ),
    click.option("--accept-numerics", is_flag=True, help="Take a format whose library computes a little differently."),
)


def changes(command):
    """The options of a conversion, which `python -m conversion certify` takes too."""
    for option in reversed(CHANGES):
        command = option(command)
    return command


@main.command(short_help="Bring a checkpoint into another format.")
@click.argument("source")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="What to write: keras (a whole model), weights (of Keras), npz (the original layout), a folder for timm, "
    "huggingface or keras_hub, or savedmodel (TensorFlow's).",
)
@click.option("--out", required=True, metavar="PATH", help="File or folder to write.")
@changes
@click.option("--force", is_flag=True, help="Replace what is at PATH.")
@click.option("--explain", is_flag=True, help="Print what went where, array by array.")
def convert(**options):
    """Convert SOURCE: a file or folder of any format that can be read, or a published model by name.

    SOURCE may be an .npz in the original layout; a .safetensors file or folder of timm or Hugging Face; a preset folder
    of keras-hub; a .keras model; weights of the old vit-keras (.h5, .weights.h5); a PyTorch state dict (.pt, .pth,
    .bin), with PyTorch installed.
    """
    _run("convert", **options)


@main.group(short_help="What has been downloaded: list, verify, clean.")
def cache():
    """Downloaded checkpoints. They lie in ~/.cache/vit-keras, or where VIT_KERAS_HOME says."""


def _cache():
    """`vit_keras.checkpoints.cache`, which needs no Keras, without its package, which does."""
    package = importlib.util.find_spec("vit_keras").submodule_search_locations[0]
    path = Path(package, "checkpoints", "cache.py")
    spec = importlib.util.spec_from_file_location("_vit_keras_cache", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in annotations
    spec.loader.exec_module(module)
    return module


@cache.command("list")
@click.argument("pattern", default="*")
def cache_list(pattern):
    """List the downloads whose address or file name matches PATTERN."""
    module = _cache()
    rows = []
    for entry in module.entries(pattern):
        state = "" if entry.path.exists() else "partial"
        rows.append((entry.path.name, f"{entry.size() / 2**20:,.1f}", state, entry.url))
    click.echo(f"{len(rows)} in {module.home()}")
    if rows:
        print_table(("file", "MiB", "", "from"), rows, right={"MiB"})


@cache.command("verify")
@click.argument("pattern", default="*")
def cache_verify(pattern):
    """Check the downloads against their recorded sha256; exit code 1 if one is not what it was.

    A corrupted one is fetched again when it is next needed.
    """
    states = [(entry.path.name, entry.state()) for entry in _cache().entries(pattern)]
    for name, state in states:
        click.echo(f"{state:9}  {name}")
    raise SystemExit(int(any(state == "corrupted" for _, state in states)))


@cache.command("clean")
@click.argument("pattern", default="*")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cache_clean(pattern, yes):
    """Remove the downloads whose address or file name matches PATTERN; nothing else is touched."""
    module = _cache()
    found = list(module.entries(pattern))
    if not found:
        click.echo("There is nothing to remove.")
        return
    for entry in found:
        click.echo(f"{entry.size() / 2**20:9,.1f} MiB  {entry.path}")
    if not yes:
        click.confirm(f"Remove these {len(found)}?", abort=True)
    freed, failed = 0, False
    for entry in found:
        try:
            freed += module.remove(entry)
        except OSError as error:
            failed = True
            click.echo(f"Left: {entry.path.name} ({error})", err=True)
    click.echo(f"{freed / 2**20:,.1f} MiB freed.")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
