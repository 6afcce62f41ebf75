"""`specdec train`: a drafter network for a target; other things that can be trained are commands below it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli import train_cospec, train_exit_heads, train_rcsd
from hf_specdec.cli import training_options as rl
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.training_command import is_given, run_training


__all__ = ["app", "train"]

app = typer.Typer(help="Train a drafter network, or what a subcommand names.")
app.command("rcsd")(train_rcsd.rcsd)
app.command("exit-heads")(train_exit_heads.exit_heads)
app.command("cospec")(train_cospec.train_cospec)

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
    answer_batch_size: rl.AnswerBatchSize = 8,
    answer_temperature: rl.AnswerTemperature = 0.0,
    answer_seed: rl.AnswerSeed = 0,
    max_steps: rl.MaxSteps = 1000,
    batch_size: rl.BatchSize = 8,
    micro_batch_size: rl.MicroBatchSize = 1,
    learning_rate: rl.LearningRate = 1e-4,
    steps: rl.Steps = 5,
    eval_every: rl.EvalEvery = 500,
    save_every: rl.SaveEvery = 500,
    held_out: rl.HeldOut = 0.05,
    seed: rl.Seed = 0,
    masked: rl.Masked = True,
    pairs: rl.Pairs = rl.PairsName.continuation,
    rejected: rl.Rejected = rl.RejectedName.all,
    beta: rl.Beta = 0.1,
    refreshes: rl.Refreshes = 2,
    recorded_texts: rl.RecordedTexts = None,
    group: rl.Group = rl.GroupName.window,
    group_size: rl.GroupSize = 8,
    credit: rl.Credit = rl.CreditName.position,
    draft_temperature: rl.DraftTemperature = 0.3,
    kl_weight: rl.KLWeight = 0.02,
    anchor_weight: rl.AnchorWeight = None,
    continual: rl.Continual = None,
    replay_share: rl.ReplayShare = 0.5,
    reference_weight: rl.ReferenceWeight = 0.1,
    trackers: rl.Trackers = None,
    features: rl.Features = None,
    fsdp: rl.FSDP = False,
    resume: rl.Resume = False,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", min=1, help="EAGLE-3: tokens that a new drafter knows, the answers' most frequent."
        ),
    ] = None,
    max_tokens: rl.MaxTokens = None,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train a drafter network on answers that the target writes to your prompts.

    The acceptance length is measured by the real decoding loop on prompts that a hash of their text holds out.
    """
    asked = dict(locals())
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    missing = ", ".join(f"--{name}" for name in _NEEDED if asked[name] is None)
    if recipe is None or missing:
        raise CommandError(f"specdec train needs {missing}; see specdec train --help")
    run_training(context, asked, recipe.value)


def _refuse_own_options(context: typer.Context) -> None:
    """Options before a subcommand would go nowhere."""
    given = [name for name in context.params if is_given(context, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise CommandError(f"{names} must stand after {context.invoked_subcommand}")
