"""`specdec card`: a drafter's model card from measured figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.options import Debug, Json
from hf_specdec.cli.output import note, print_json


__all__ = ["card"]


@reports_errors
def card(
    folder: Annotated[Path, typer.Argument(help="The drafter's folder.", show_default=False)],
    results: Annotated[
        Path | None, typer.Option("--results", help="JSON of `specdec bench`; results.json in the folder by default.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The drafter's Hub id, ORG/NAME.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The target's Hub id; by default as the drafter's config says.")
    ] = None,
    base_revision: Annotated[str | None, typer.Option("--base-revision", help="The target's revision.")] = None,
    license: Annotated[str | None, typer.Option("--license", help="Licence; must fit the target's.")] = None,
    language: Annotated[list[str] | None, typer.Option("--language", help="May be repeated.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", help="Hub id of training data; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the card goes; into the drafter's folder by default.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write README.md, and copy the figures and their plot beside it. A card that is there keeps its prose."""
    from hf_specdec.hub.card import CARD, PLOT, RESULTS, CardFacts, render_card

    facts = CardFacts(
        name=name,
        base_model=base_model,
        base_revision=base_revision,
        license=license,
        languages=tuple(language) if language else None,
        datasets=tuple(dataset) if dataset else None,
    )
    place = out or folder
    text = render_card(folder, results, facts, place / CARD)
    place.mkdir(parents=True, exist_ok=True)
    results = results or folder / RESULTS
    if results.resolve() != (place / RESULTS).resolve():
        plot = results.with_suffix(".png")
        shutil.copyfile(results, place / RESULTS)
        if plot.is_file():
            shutil.copyfile(plot, place / PLOT)
        else:
            (place / PLOT).unlink(missing_ok=True)  # it would show other figures
    (place / CARD).write_text(text, encoding="utf-8")
    if as_json:
        files = [name for name in (CARD, RESULTS, PLOT) if (place / name).is_file()]
        print_json({"drafter": str(folder), "out": str(place), "files": files})
        return
    note(f"wrote {place / CARD}")
