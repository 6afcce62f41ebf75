"""`specdec calibrate nucleus`: the nucleus mass for a bound on the distance from the target, from texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.calibrating import about_pair, base_config, calibrate_pair, read_some
from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.models import load_models
from hf_specdec.cli.output import note, print_json


if TYPE_CHECKING:
    from hf_specdec.nucleus_calibration import NucleusCalibration


__all__ = ["nucleus"]


@reports_errors
def nucleus(
    target: opt.Target,
    draft: opt.Draft,
    data: opt.Texts,
    field: opt.Field = "text",
    prompt_field: opt.PromptField = None,
    limit: opt.Limit = None,
    max_tokens: opt.MaxTokens = 512,
    tv_bound: Annotated[
        float, typer.Option("--tv-bound", min=0.0, max=1.0, help="Largest mean total variation of a step.")
    ] = 0.05,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 1.0,
    config: Annotated[
        str,
        typer.Option("--config", "-c", help="Nucleus config whose other options are kept: nucleus, or a saved one."),
    ] = "nucleus",
    save: Annotated[Path | None, typer.Option("--save", help="Folder to write the config and a card to.")] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure acceptance and distance of every nucleus mass along your texts, and pick the largest within a bound."""
    from hf_specdec.acceptance import pair_fingerprint
    from hf_specdec.configs import NucleusConfig
    from hf_specdec.hub.artefact import write_artefact
    from hf_specdec.nucleus_calibration import calibrate_nucleus

    base = base_config(config, NucleusConfig, "a nucleus")
    texts = read_some(data, prompt_field, field, limit)
    models = load_models(target, draft, dtype=dtype, device_map=device_map, quantization=quantization)
    found = calibrate_pair(
        calibrate_nucleus,
        models,
        texts,
        "Reading",
        tv_bound=tv_bound,
        temperature=temperature or 1.0,
        greedy=temperature == 0.0,
        max_tokens=max_tokens,
        config=base,
    )
    about = about_pair(target, draft, data, pair_fingerprint(models.target.config, models.assistant.config))
    if save is not None:
        write_artefact(save, "Nucleus mass of NSD", found.summary(), found.config, about, found.to_dict())
    if as_json:
        print_json({**about, "saved": None if save is None else str(save), **found.to_dict()})
        return
    _print_table(found)
    if save is not None:
        note(f"saved {save}: use it with --config {save}")


def _print_table(found: NucleusCalibration) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("nucleus_p", "accepts", "mean TV", "max TV", "greedy: accepts", "greedy: foreign")
    for each in found.grid:
        table.add_row(
            f"{each.nucleus_p:g}",
            f"{each.acceptance:.1%}",
            f"{each.mean_tv:.4f}",
            f"{each.max_tv:.4f}",
            f"{each.greedy_acceptance:.1%}",
            f"{each.greedy_tv:.1%}",
            style="bold" if each is found.chosen else None,
        )
    console = Console()
    console.print(table)
    console.print(found.summary(), markup=False, highlight=False, soft_wrap=True)
