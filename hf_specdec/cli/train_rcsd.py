"""`specdec train rcsd`: the recipes of RCSD under one name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli import training_options as rl
from hf_specdec.cli.errors import reports_errors
from hf_specdec.cli.training_command import run_training


__all__ = ["rcsd"]


class MethodName(StrEnum):
    """The two ways of RCSD."""

    dpo = "dpo"
    grpo = "grpo"


@reports_errors
def rcsd(
    context: typer.Context,
    target: opt.Target,
    data: opt.PromptFile,
    start: Annotated[
        Path, typer.Option("--start", help="The drafter to go on from, such as a HASS one.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", show_default=False)],
    method: Annotated[MethodName, typer.Option("--method", help="How preferences are learnt.")] = MethodName.dpo,
    field: opt.Field = "prompt",
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 256,
    answer_batch_size: rl.AnswerBatchSize = 8,
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
    max_tokens: rl.MaxTokens = None,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train a drafter on what verification accepts and rejects: specdec train with --recipe rcsd-dpo or rcsd-grpo.

    With --continual it learns the rounds of live use in that folder, and answers to --data keep what it knew.
    """
    run_training(context, dict(locals()), f"rcsd-{method.value}")
