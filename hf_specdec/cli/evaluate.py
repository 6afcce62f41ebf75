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
_STEPS = "3,4,5,6"


@reports_errors
def evaluate(
    target: opt.Target,
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="Prompts: lines of text, or a .jsonl file; repeated, each file is a data set.",
            show_default=False,
        ),
    ],
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Folder or Hub id of the drafter network.", show_default=False)
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", help="Tokens drafted per round, with spaces or commas between them: 3 4 5 6 unless given."
        ),
    ] = None,
    more_steps: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
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
        typer.Option(
            "--report",
            help="Write FILE.json, FILE.md and FILE.png, which keep what they hold of other targets and data sets.",
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            help="What the report calls the target; its folder's name by default.",
            rich_help_panel=_SEVERAL,
        ),
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
    from hf_specdec.cli.texts import encode_prompt

    counts = _counts(steps, more_steps or [])
    arms = _arms_of(arm or [])
    _check_sides(drafter or baseline, arms, control, report)
    if model_name is not None and report is None:
        raise CommandError("--model-name is for reports: pass --report FILE too")
    texts = _data_sets(data, field, limit)
    models = load_models(target, None, dtype=dtype, packed=False)
    prompts = {
        name: [encode_prompt(models.tokenizer, text, chat, system) for text in each] for name, each in texts.items()
    }
    if arms:
        with quiet():
            several = _compare(models, arms, prompts, counts, max_new_tokens, control, batch_size)
        _show(several, report, model_name or Path(target).name, as_json)
        return
    given = {role: name for role, name in (("drafter", drafter), ("baseline", baseline)) if name is not None}
    with quiet():
        found = _measure(models, given, prompts, counts, max_new_tokens)
    if as_json:
        about = {"target": target, "names": {"drafter": drafter, "baseline": baseline}}
        taus = {name: {"tau": each} for name, each in found.items()}
        print_json(about | (next(iter(taus.values())) if len(taus) == 1 else {"datasets": taus}))
        return
    for name, roles in found.items():
        for role, row in roles.items():
            cells = (f"{k} drafts: {one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for k, one in row.items())
            note(f"{name}, {role}: {'; '.join(cells)}" if len(found) > 1 else f"{role}: {'; '.join(cells)}")


def _data_sets(files: list[Path], field: str, limit: int | None) -> dict[str, list[str]]:
    """Texts by the name of their file."""
    from hf_specdec.cli.texts import read_texts

    names = [file.stem for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CommandError(f"--data names data sets by their files, and {', '.join(twice)} comes twice: rename one")
    return {file.stem: read_texts(file, field, limit) for file in files}


def _check_sides(one: object, arms: dict[str, list[str]], control: str | None, report: Path | None) -> None:
    """Options that would go nowhere are refused, before anything is loaded."""
    if arms and one:
        raise CommandError("--drafter and --baseline measure one or two, --arm several: pass one kind of them")
    if not arms and (control or report):
        raise CommandError("--control and --report are about several drafters: pass --arm NAME=FOLDER for each")
    if not arms and not one:
        raise CommandError("pass --drafter FOLDER, or --arm NAME=FOLDER for each of several")
    if control is not None and control not in arms:
        raise CommandError(f"--control names one of the arms {', '.join(arms)}, got {control!r}")


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


def _measure(
    models: Any, given: dict[str, str], prompts: dict[str, list[list[int]]], counts: list[int], max_new_tokens: int
) -> dict[str, dict[str, Any]]:
    """By data set, role and number of drafts."""
    from hf_specdec.networks import AutoDrafter

    found: dict[str, dict[str, Any]] = {name: {role: {} for role in given} for name in prompts}
    done, total = 0, len(prompts) * len(given) * len(counts)
    with progress_bar("Measuring") as show:
        for role, folder in given.items():
            network = AutoDrafter.from_pretrained(folder, target=models.target, tokenizer=models.tokenizer)
            for name, each in prompts.items():
                for k in counts:
                    found[name][role][str(k)] = _tau(models.target, network, each, k, max_new_tokens)
                    done += 1
                    show(done, total)
    return found


def _compare(
    models: Any,
    arms: dict[str, list[str]],
    prompts: dict[str, list[list[int]]],
    counts: list[int],
    max_new_tokens: int,
    control: str | None,
    batch_size: int,
) -> dict[str, dict[str, Any]]:
    from hf_specdec.networks import AutoDrafter
    from hf_specdec.quality.drafters import compare, compare_drafters

    networks = {
        name: [AutoDrafter.from_pretrained(each, target=models.target, tokenizer=models.tokenizer) for each in folders]
        for name, folders in arms.items()
    }
    about = {"seeds": list(range(max(map(len, arms.values())))), "max_new_tokens": max_new_tokens}
    found = {}
    for name, each in prompts.items():
        with progress_bar("Measuring" if len(prompts) == 1 else f"Measuring {name}") as show:
            measured = compare_drafters(
                models.target,
                networks,
                each,
                steps=counts,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                progress=show,
            )
        found[name] = {**about, **compare(measured, baseline=next(iter(arms)), control=control)}
    return found


def _show(several: dict[str, dict[str, Any]], report: Path | None, model: str, as_json: bool) -> None:
    from hf_specdec.quality.drafters import table, write_report

    for name, found in several.items():
        if report is not None:
            about = {"seeds": found["seeds"], "max_new_tokens": found["max_new_tokens"]}
            write_report(report, found, model=model, dataset=name, about=about)
        if not as_json:
            if len(several) > 1:
                typer.echo(f"{name}:\n")
            typer.echo(table(found))
            note("texts are the same in every arm" if found["same_text"] else "TEXTS DIFFER between arms")
    if as_json:
        print_json(next(iter(several.values())) if len(several) == 1 else {"datasets": several})


def _counts(steps: str | None, more: list[str]) -> list[int]:
    """`--steps 3,4,5,6`, or `--steps 3 4 5 6`, of which the command line takes all but the first for arguments."""
    if steps is None and more:
        raise CommandError(f"nothing stands before {' '.join(more)} that says what it is: did you mean --steps?")
    given = [each for part in (steps or _STEPS, *more) for each in part.replace(",", " ").split()]
    try:
        counts = [int(each) for each in given]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise CommandError(
            f"--steps needs numbers of at least 1, as in 3 4 5 6 or 3,4,5,6; got {' '.join([steps or '', *more])!r}"
        )
    return list(dict.fromkeys(counts))


def _tau(target: Any, network: Any, prompts: list[list[int]], steps: int, max_new_tokens: int) -> dict[str, Any]:
    from hf_specdec.quality.statistics import bootstrap_mean
    from hf_specdec.training.acceptance import acceptance_lengths

    lengths = acceptance_lengths(target, network, prompts, steps=steps, max_new_tokens=max_new_tokens)
    if not lengths:
        raise CommandError("no answer is longer than one token, so there is nothing to draft: pass other prompts")
    return {**asdict(bootstrap_mean(lengths)), "values": lengths}
