"""`specdec demo`: the bundled pair, plain and speculative side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import print_json


__all__ = ["demo"]


@reports_errors
def demo(
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="New tokens per prompt.")] = 96,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="Methods to put side by side: assistant, lookup, self-draft, the name of a bundled drafter such as hass, or "
            "all; may be repeated, or several with commas.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show plain and speculative decoding side by side on a tiny pair of models that comes with the package."""
    from rich.console import Console

    console = Console(stderr=as_json)  # whatever is shown under --json stays off standard output
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "as_json": as_json}
    if method:
        from hf_specdec.demo.comparison import compare_methods
        from hf_specdec.demo.methods import chosen_names

        result = compare_methods(console, chosen_names(method), **options)
    else:
        from hf_specdec.demo.run import run_demo

        result = run_demo(console, **options)
    if as_json:
        print_json(result)
