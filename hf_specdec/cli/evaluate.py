"""`specdec evaluate`: acceptance lengths of a drafter network."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.output import note, print_json, progress_bar


__all__ = ["evaluate"]

_SEVERAL = "Several drafters"


@reports_errors
def evaluate(
    target: opt.Target,
    data: opt.PromptFile,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Folder or Hub id of the drafter network.", show_default=False)
    ] = None,
    steps: Annotated[str, typer.Option("--steps", help="Tokens drafted per round, separated by commas.")] = "3,4,5,6",
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Another drafter network, measured beside it.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="NAME=FOLDER, or NAME=FOLDER,FOLDER for several seeds, in place of --drafter; the first is the baseline.",
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    control: Annotated[
        str | None, typer.Option("--control", help="The arm that others must beat.", rich_help_panel=_SEVERAL)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write FILE.json, FILE.md and FILE.png.", rich_help_panel=_SEVERAL),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Prompts decoded together.", rich_help_panel=_SEVERAL)
    ] = 1,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure the acceptance length tau (the bonus token counted) of a drafter network, greedy, for each draft length.

    In brackets: the 95 % bootstrap interval of the mean over prompts.
    """
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.cli.texts import encode_prompt, read_texts
    from hf_specdec.networks import AutoDrafter

    counts = _counts(steps)
    _check_sides(drafter or baseline, arm, control or report)
    texts = read_texts(data, field, limit)
    models = load_models(target, None, dtype=dtype, packed=False)
    prompts = [encode_prompt(models.tokenizer, text, chat, system) for text in texts]
    if arm:
        with quiet():
            several = _compare(models, _arms_of(arm), prompts, counts, max_new_tokens, control, batch_size)
        _show(several, report, Path(target).name, data.stem, as_json)
        return
    given = {role: name for role, name in (("drafter", drafter), ("baseline", baseline)) if name is not None}
    found: dict[str, dict[str, Any]] = {}
    with quiet(), progress_bar("Measuring") as show:
        for role, name in given.items():
            network = AutoDrafter.from_pretrained(name, target=models.target, tokenizer=models.tokenizer)
            found[role] = {}
            for k in counts:
                found[role][str(k)] = _tau(models.target, network, prompts, k, max_new_tokens)
                show(sum(map(len, found.values())), len(given) * len(counts))
    if as_json:
        print_json({"target": target, "names": {"drafter": drafter, "baseline": baseline}, "tau": found})
        return
    for role, row in found.items():
        cells = (f"{k} drafts: {each['mean']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for k, each in row.items())
        note(f"{role}: {'; '.join(cells)}")


def _check_sides(one: object, several: list[str] | None, beside_several: object) -> None:
    """Options that would go nowhere are refused, before anything is loaded."""
    if several and one:
        raise CommandError("--drafter and --baseline measure one or two, --arm several: pass one kind of them")
    if not several and beside_several:
        raise CommandError("--control and --report are about several drafters: pass --arm NAME=FOLDER for each")
    if not several and not one:
        raise CommandError("pass --drafter FOLDER, or --arm NAME=FOLDER for each of several")


def _arms_of(arms: list[str]) -> dict[str, list[str]]:
    """Folders by name."""
    found: dict[str, list[str]] = {}
    for each in arms:
        name, equals, folders = each.partition("=")
        if not (name and equals and folders) or name in found:
            raise CommandError(
                f"--arm needs NAME=FOLDER with a name of its own, as in hass=drafters/hass; got {each!r}"
            )
        found[name] = folders.split(",")
    return found


def _compare(
    models: Any,
    arms: dict[str, list[str]],
    prompts: list[list[int]],
    counts: list[int],
    max_new_tokens: int,
    control: str | None,
    batch_size: int,
) -> dict[str, Any]:
    from hf_specdec.networks import AutoDrafter
    from hf_specdec.quality.drafters import compare, compare_drafters

    if control is not None and control not in arms:
        raise CommandError(f"--control names one of the arms {', '.join(arms)}, got {control!r}")
    networks = {
        name: [AutoDrafter.from_pretrained(each, target=models.target, tokenizer=models.tokenizer) for each in folders]
        for name, folders in arms.items()
    }
    with progress_bar("Measuring") as show:
        found = compare_drafters(
            models.target,
            networks,
            prompts,
            steps=counts,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            progress=show,
        )
    seeds = max(map(len, arms.values()))
    about = {"seeds": list(range(seeds)), "max_new_tokens": max_new_tokens}
    return {**about, **compare(found, baseline=next(iter(arms)), control=control)}


def _show(found: dict[str, Any], report: Path | None, model: str, dataset: str, as_json: bool) -> None:
    from hf_specdec.quality.drafters import table, write_report

    if report is not None:
        about = {"seeds": found["seeds"], "max_new_tokens": found["max_new_tokens"]}
        write_report(report, found, model=model, dataset=dataset, about=about)
    if as_json:
        print_json(found)
        return
    typer.echo(table(found))
    note("texts are the same in every arm" if found["same_text"] else "TEXTS DIFFER between arms")


def _counts(steps: str) -> list[int]:
    try:
        counts = [int(each) for each in steps.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise CommandError(f"--steps needs numbers of at least 1, separated by commas, as in 3,4,5,6; got {steps!r}")
    return counts


def _tau(target: Any, network: Any, prompts: list[list[int]], steps: int, max_new_tokens: int) -> dict[str, Any]:
    from hf_specdec.quality.statistics import bootstrap_mean
    from hf_specdec.training.acceptance import acceptance_lengths

    lengths = acceptance_lengths(target, network, prompts, steps=steps, max_new_tokens=max_new_tokens)
    if not lengths:
        raise CommandError("no answer is longer than one token, so there is nothing to draft: pass other prompts")
    return {**asdict(bootstrap_mean(lengths)), "values": lengths}
