"""`python -m conversion`: convert one checkpoint, certify it, or release a list of them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click

import vit_keras_cli
from vit_keras_cli import print_table


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main():
    """Conversion of checkpoints, with proof. `python -m conversion convert` is `vit-keras convert`."""


main.add_command(vit_keras_cli.convert)


@main.command()
@click.argument("source", type=click.Path(exists=True))
@click.option("--target", type=click.Path(exists=True), help="What SOURCE was converted to. Default: SOURCE itself.")
@vit_keras_cli.changes
@click.option("--out", help="File of the certificate. Default: SOURCE or TARGET with .certificate.json.")
def certify(source, target, out, **options):
    """Compare the Keras model of SOURCE, or of TARGET, with a float64 NumPy forward pass of SOURCE, stage by stage."""
    from conversion import certificate
    from vit_keras.checkpoints.export import check_place

    out = out or f"{(target or source).rstrip('/')}.certificate.json"
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        check_place(out, force=True, is_file=True)
        result = certificate.certify(source, target, **chosen)
        certificate.save(result, out)
    except (ValueError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    rows = [
        (name, f"{stage['max']:.1e}", f"{stage['mean']:.1e}", f"{stage['relative']:.1e}")
        for name, stage in result["stages"].items()
    ]
    print_table(("stage", "max difference", "mean", "of largest"), rows, right={"max difference", "mean", "of largest"})
    for problem in result["problems"]:
        click.echo(problem)
    click.echo(f"{result['verdict']}, at a tolerance of {result['tolerance']:.0e} of the largest value: {out}")
    raise SystemExit(int(result["verdict"] != "pass"))


@main.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False))
def release(manifest):
    """Convert and certify the checkpoints of MANIFEST, a JSON file; what is done already is not done again."""
    from conversion import release as releasing

    try:
        outcomes = releasing.release(manifest)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    rows = [(outcome.name, outcome.target, outcome.state, outcome.detail) for outcome in outcomes]
    print_table(("checkpoint", "target", "state", ""), rows)
    raise SystemExit(int(any(outcome.state == "failed" for outcome in outcomes)))


if __name__ == "__main__":
    main()
