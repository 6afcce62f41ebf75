"""The command line, `specdec`. Commands import torch and transformers when they run, not when they are listed."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_specdec.cli import (
    bench,
    calibrate,
    card,
    demo,
    evaluate,
    export,
    generate,
    info,
    publish,
    quality,
    train,
    verify,
)


__all__ = ["app", "main"]

app = typer.Typer(
    name="specdec",
    help="Speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("verify")(verify.verify)
app.add_typer(calibrate.app, name="calibrate")
app.command("bench")(bench.bench)
app.command("quality")(quality.quality)
app.command("export")(export.export)
app.add_typer(train.app, name="train")
app.command("evaluate")(evaluate.evaluate)
app.command("card")(card.card)
app.command("publish")(publish.publish)
app.command("info")(info.info)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_specdec {info.version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face transformers."""


def main() -> None:
    """Runs the command line."""
    app()
