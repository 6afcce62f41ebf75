"""`specdec train`: a drafter network for a target; other things that can be trained are commands below it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli import train_cospec, train_exit_heads
from hf_specdec.cli import training_options as rl
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.output import note, print_json


if TYPE_CHECKING:
    from hf_specdec.cli.training_run import LiveUse
    from hf_specdec.training.recipes import Recipe


__all__ = ["app", "train"]

app = typer.Typer(help="Train a drafter network, or what a subcommand names.")
app.command("exit-heads")(train_exit_heads.exit_heads)
app.command("cospec")(train_cospec.train_cospec)

_CONTINUAL = ("replay_share", "reference_weight")
_NEEDED = ("target", "data", "recipe", "out")


class RecipeName(StrEnum):
    """The recipes."""

    hass = "hass"
    eagle3 = "eagle3"
    kl = "kl"
    eal = "eal"
    wtv = "wtv"
    vat = "vat"
    lk = "lk"
    rcsd_dpo = "rcsd-dpo"
    rcsd_grpo = "rcsd-grpo"
    eal_grpo = "eal+grpo"
    wtv_grpo = "wtv+grpo"


@app.callback(invoke_without_command=True)
@reports_errors
def train(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option("--target", "--model", "-t", help="Folder or Hub id of the target; needed.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Prompts: lines of text, or a .jsonl file; needed.")
    ] = None,
    recipe: Annotated[RecipeName | None, typer.Option("--recipe", help="Network and loss; needed.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to; needed.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start", help="A drafter to go on from, which all but hass, eagle3, kl and vat want."),
    ] = None,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    max_steps: Annotated[int, typer.Option("--max-steps", help="Optimiser steps.")] = 1000,
    answer_batch_size: Annotated[
        int, typer.Option("--answer-batch-size", min=1, help="Prompts that the target answers at once.")
    ] = 8,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Texts per optimiser step, over all processes.")] = 8,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", help="Texts per forward pass; the gradients of a step add up.")
    ] = 1,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The highest one.")] = 1e-4,
    steps: Annotated[int, typer.Option("--steps", help="Tokens drafted per round in evaluations.")] = 5,
    eval_every: Annotated[int, typer.Option("--eval-every", help="Steps between evaluations.")] = 500,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints.")] = 500,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the prompts that evaluate.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Decides the first weights and the order.")] = 0,
    masked: rl.Masked = True,
    pairs: rl.Pairs = rl.PairsName.continuation,
    beta: rl.Beta = 0.1,
    refreshes: rl.Refreshes = 2,
    recorded_texts: rl.RecordedTexts = None,
    group: rl.Group = rl.GroupName.window,
    group_size: rl.GroupSize = 8,
    kl_weight: rl.KLWeight = 0.02,
    continual: rl.Continual = None,
    replay_share: rl.ReplayShare = 0.5,
    reference_weight: rl.ReferenceWeight = 0.1,
    trackers: rl.Trackers = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", min=1, help="EAGLE-3: tokens that a new drafter knows, the answers' most frequent."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=3, help="Longest text; what follows is not trained on.")
    ] = None,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train a drafter network on answers that the target writes to your prompts.

    The acceptance length is measured by the real decoding loop on prompts that a hash of their text holds out.
    """
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    from hf_specdec.cli.models import load_models, quiet
    from hf_specdec.cli.texts import read_texts
    from hf_specdec.cli.training_run import TrainingRun, check_trackers, own_device
    from hf_specdec.training.options import TrainingOptions
    from hf_specdec.training.rcsd import RCSDTraining
    from hf_specdec.training.recipes import stages_of

    if target is None or data is None or recipe is None or out is None:
        missing = ", ".join(f"--{name}" for name in _NEEDED if context.params[name] is None)
        raise CommandError(f"specdec train needs {missing}; see specdec train --help")
    options = TrainingOptions(
        max_steps=max_steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        learning_rate=learning_rate,
        eval_every=eval_every,
        save_every=save_every,
        seed=seed,
        mixed_precision="bf16" if dtype is opt.DTypeName.bfloat16 else "no",
    )
    rcsd = RCSDTraining(
        masked=masked,
        pairs=pairs.value,
        beta=beta,
        refreshes=1 if continual is not None and not _is_given(context, "refreshes") else refreshes,
        recorded_texts=recorded_texts,
        group=group.value,
        group_size=group_size,
        kl_weight=kl_weight,
    )
    stages = stages_of(recipe.value, rcsd)
    _check_start(context, stages)
    live = None if continual is None else _live(context, continual)
    prompts = read_texts(data, field, limit)
    if not resume and out.exists() and (any(out.glob("checkpoint-*")) or any(out.glob("stage-*"))):
        raise CommandError(f"{out} holds checkpoints: pass --resume to go on, or another folder")
    names = [name.strip() for name in (trackers or "").split(",") if name.strip()]
    check_trackers(names)
    models = load_models(target, None, dtype=dtype, packed=False, device_map=own_device())
    trained, evaluating = _sides(prompts, held_out, models.tokenizer, chat, system)
    out.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(
        models.target,
        models.tokenizer,
        trained,
        evaluating,
        stages,
        options,
        out,
        max_new_tokens,
        steps,
        resume,
        start,
        draft_vocab_size,
        max_tokens,
        live,
        names,
        answer_batch_size,
    )
    with quiet():
        result = run()
    if result is None:  # one process prints
        return
    if as_json:
        print_json({"target": target, "recipe": recipe.value, "out": str(out), **result})
        return
    recorded = "" if live is None else f" (tau {result['tau_recorded']:.3f} on rounds of live use)"
    note(
        f"wrote {out}: tau {result['tau']:.3f} with {steps} drafts per round, over {len(evaluating)} held-out "
        f"prompts{recorded}"
    )


def _check_start(context: typer.Context, stages: list[Recipe]) -> None:
    asked = context.params
    name, start = asked["recipe"].value, asked["start"]
    if start is None and stages[0].reference:
        raise CommandError(f"--recipe {name} goes on from a trained drafter: pass --start FOLDER")
    if start is not None and asked["draft_vocab_size"] is not None:
        raise CommandError(
            "--draft-vocab-size is for new drafters, the one of --start has its own: pass one of the two"
        )
    if asked["continual"] is None:
        if given := [each for each in _CONTINUAL if _is_given(context, each)]:
            raise CommandError(f"--{given[0].replace('_', '-')} is for rounds of live use: pass --continual FOLDER too")
        return
    if start is None:
        raise CommandError("--continual goes on from the drafter of the live use: pass --start FOLDER")
    if len(stages) > 1:
        raise CommandError(f"--continual takes one stage, --recipe {name} has {len(stages)} here: pass another recipe")


def _live(context: typer.Context, folder: Path) -> LiveUse:
    from hf_specdec.cli.training_run import live_use
    from hf_specdec.training.continual import ContinualTraining
    from hf_specdec.training.rcsd import read_shards

    asked = context.params
    keeping = ContinualTraining(replay_share=asked["replay_share"], reference_weight=asked["reference_weight"])
    return live_use(list(read_shards(folder)), asked["held_out"], asked["max_tokens"], keeping)


def _sides(
    prompts: list[str], share: float, tokenizer: Any, chat: bool | None, system: str | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts to train on, and of those to evaluate with."""
    from hf_specdec.cli.texts import encode_prompt
    from hf_specdec.training.answers import is_held_out

    sides: dict[bool, list[list[int]]] = {True: [], False: []}
    for prompt in prompts:
        sides[is_held_out(prompt, share)].append(encode_prompt(tokenizer, prompt, chat, system))
    if not sides[False] or not sides[True]:
        raise CommandError(
            f"of {len(prompts)} prompts, {len(sides[True])} are held out: pass more prompts or another --held-out"
        )
    return sides[False], sides[True]


def _refuse_own_options(context: typer.Context) -> None:
    """Options before a subcommand would go nowhere."""
    given = [name for name in context.params if _is_given(context, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise CommandError(f"{names} must stand after {context.invoked_subcommand}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
