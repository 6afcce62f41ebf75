"""`specdec export`: a drafter network in another checkpoint format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import note, print_json
from hf_specdec.errors import InvalidConfigError


__all__ = ["export"]


class FormatName(StrEnum):
    """The formats that can be written."""

    hf = "hf"
    eagle3 = "eagle3"
    speculators = "speculators"
    vllm = "vllm"
    sglang = "sglang"
    custom_generate = "custom_generate"


@reports_errors
def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of the drafter network.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", show_default=False)],
    format: Annotated[FormatName, typer.Option("--format", "-f", help="Format to write.")] = FormatName.hf,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Target, whose embeddings a speculators checkpoint holds a copy of."),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")] = None,
    allow_bin: Annotated[
        bool, typer.Option("--allow-bin", help="Read pytorch_model.bin where there are no safetensors.")
    ] = False,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo", help="Hub id from which custom_generate loads the drafter where its code is called by itself."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a drafter network in the format that another program reads, and read it back to check it."""
    from hf_specdec.cli.models import quiet
    from hf_specdec.networks.auto import load_network
    from hf_specdec.networks.checkpoint import read_checkpoint
    from hf_specdec.networks.export import export_drafter

    if repo is not None and format is not FormatName.custom_generate:
        raise InvalidConfigError(f"--repo is for --format custom_generate, and the format is {format.value}: drop it")
    with quiet():
        network = load_network(read_checkpoint(drafter, revision=revision, allow_bin=allow_bin))
        if target is not None:
            from hf_specdec.loading import load_model

            network.attach(load_model(target, packed=False))
        if format is FormatName.custom_generate:
            from hf_specdec.hub.custom_generate import export_custom_generate

            folder = export_custom_generate(network, out, repo)
        else:
            folder = export_drafter(network, out, format.value)
    if as_json:
        print_json(
            {"drafter": drafter, "family": network.config.model_type, "format": format.value, "out": str(folder)}
        )
        return
    note(f"wrote {folder} in the format {format.value}, and read it back")
