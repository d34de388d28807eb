"""The console command's door: arguments and help, without importing Keras until a command needs it.

`import vit_keras` registers every layer with Keras and so takes seconds; this module stands beside the package, so
that `vit-keras --help` does not.
"""

import importlib
import os

import click


def _run(command: str, **arguments):
    """Import and run a command of `vit_keras.cli`; errors of the user's making become one line and exit code 2."""
    # Before TensorFlow is imported, and only where the user has not said otherwise: its start-up lines are no news.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return importlib.import_module(f"vit_keras.cli.{command}").run(**arguments)
    except ImportError as error:  # TensorFlow or an extra is missing, and the message names it
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vit-keras-zoo")
def main():
    """Vision Transformers for Keras 3 and TensorFlow."""


@main.command(short_help="List the architectures: sizes, parameters, GFLOPs.")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(pattern, as_json):
    """List the architectures whose name matches PATTERN (such as 'vit_b*'): sizes, parameters, GFLOPs."""
    _run("models", pattern=pattern, as_json=as_json)


@main.command(short_help="Name what image files show.")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("--weights", required=True, metavar="FILE", help="A .keras model or an .npz checkpoint.")
@click.option("--labels", metavar="FILE", help="Class names, one a line. Default: the indices.")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="Classes per image.")
@click.option(
    "--image-size",
    nargs=2,
    type=click.IntRange(min=1),
    metavar="HEIGHT WIDTH",
    help="Size images are resized to. Default: the model's.",
)
@click.option("--batch-size", default=8, show_default=True, type=click.IntRange(min=1), help="Images at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
def predict(images, **options):
    """Print the most probable classes of each IMAGE (JPEG, PNG and what else Pillow reads).

    An image that cannot be read is named, the others are predicted all the same, and the exit code is 1.
    """
    raise SystemExit(_run("predict", images=images, **options))


if __name__ == "__main__":
    main()
