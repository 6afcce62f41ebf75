"""`specdec publish`: a drafter's folder to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import note, print_json


__all__ = ["publish"]


@reports_errors
def publish(
    folder: Annotated[Path, typer.Argument(help="The drafter's folder, with its card.", show_default=False)],
    repo: Annotated[str, typer.Option("--repo", help="Hub id, ORG/NAME.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list; send nothing.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Upload weights, config, card, results and plots in one commit. A card with other figures than results.json is refused."""
    from hf_specdec.hub.publish import prepare_upload
    from hf_specdec.hub.publish import publish as send

    upload = prepare_upload(folder, repo)
    if not as_json:
        for name in upload.files:
            typer.echo(name)
    commit = None if dry_run else send(upload, private=private)
    if as_json:
        print_json({"repo": repo, "files": list(upload.files), "num_bytes": upload.num_bytes, "commit": commit})
    elif commit is None:
        note(f"{len(upload.files)} files, {upload.num_bytes} bytes; nothing was sent to {repo}")
    else:
        note(f"published {commit}")
