"""`specdec demo`: the bundled pair, plain and speculative side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import print_json


__all__ = ["demo"]


@reports_errors
def demo(
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="New tokens per prompt.")] = 96,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show plain and speculative decoding side by side on a tiny pair of models that comes with the package."""
    from rich.console import Console

    from hf_specdec.demo.run import run_demo

    console = Console(stderr=as_json)  # whatever is shown under --json stays off standard output
    result = run_demo(console, max_new_tokens=max_new_tokens, as_json=as_json)
    if as_json:
        print_json(result)
