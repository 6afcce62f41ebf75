"""Options that `specdec train` and `specdec train rcsd` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


__all__ = [
    "FSDP",
    "AnchorWeight",
    "AnswerBatchSize",
    "AnswerSeed",
    "AnswerTemperature",
    "BatchSize",
    "Beta",
    "Continual",
    "Credit",
    "CreditName",
    "DraftTemperature",
    "EvalEvery",
    "Features",
    "Group",
    "GroupName",
    "GroupSize",
    "HeldOut",
    "KLWeight",
    "LearningRate",
    "Masked",
    "MaxSteps",
    "MaxTokens",
    "MicroBatchSize",
    "Pairs",
    "PairsName",
    "RecordedTexts",
    "ReferenceWeight",
    "Refreshes",
    "Rejected",
    "RejectedName",
    "ReplayShare",
    "Resume",
    "SaveEvery",
    "Seed",
    "Steps",
    "Trackers",
]

_RCSD = "RCSD stages"
_LIVE = "Rounds of live use"


class PairsName(StrEnum):
    """Readings of a preference pair."""

    literal = "literal"
    continuation = "continuation"


class RejectedName(StrEnum):
    """What of a rejected draft is the rejected side of a pair."""

    first = "first"
    all = "all"


class GroupName(StrEnum):
    """What GRPO compares."""

    window = "window"
    response = "response"


class CreditName(StrEnum):
    """What GRPO gives an advantage to."""

    position = "position"
    window = "window"


AnswerBatchSize = Annotated[
    int, typer.Option("--answer-batch-size", min=1, help="Prompts that the target answers at once.")
]
AnswerTemperature = Annotated[
    float, typer.Option("--answer-temperature", min=0.0, help="The target's answers: 0 greedy, above it sampled.")
]
AnswerSeed = Annotated[int, typer.Option("--answer-seed", help="Decides sampled answers.")]
MaxSteps = Annotated[int, typer.Option("--max-steps", help="Optimiser steps.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Texts per optimiser step, over all processes.")]
MicroBatchSize = Annotated[
    int, typer.Option("--micro-batch-size", help="Texts per forward pass; the gradients of a step add up.")
]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="The highest one.")]
Steps = Annotated[int, typer.Option("--steps", help="Tokens drafted per round in evaluations.")]
EvalEvery = Annotated[int, typer.Option("--eval-every", help="Steps between evaluations.")]
SaveEvery = Annotated[int, typer.Option("--save-every", help="Steps between checkpoints.")]
HeldOut = Annotated[float, typer.Option("--held-out", help="Share of the prompts that evaluate.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides the first weights and the order.")]
Features = Annotated[
    Path | None,
    typer.Option(
        "--features",
        help="Write the target's features to this folder first, so that epochs cost no pass of the target.",
    ),
]
FSDP = Annotated[
    bool, typer.Option("--fsdp", help="Several processes split the drafter's weights and moments among them.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=3, help="Longest text; what follows is not trained on.")
]

Masked = Annotated[
    bool,
    typer.Option(
        "--masked/--unmasked", help="Never penalise tokens that are the target's own choice.", rich_help_panel=_RCSD
    ),
]
Pairs = Annotated[
    PairsName,
    typer.Option(
        "--pairs",
        help="DPO: prefer the accepted tokens (literal) or what the target wrote (continuation) to the rejected ones.",
        rich_help_panel=_RCSD,
    ),
]
Rejected = Annotated[
    RejectedName,
    typer.Option(
        "--rejected",
        help="DPO: the rejected side is the first rejected token, or all from there on.",
        rich_help_panel=_RCSD,
    ),
]
Beta = Annotated[float, typer.Option("--beta", help="DPO: how sharply preferences count.", rich_help_panel=_RCSD)]
Refreshes = Annotated[
    int, typer.Option("--refreshes", help="DPO: how often rounds are recorded.", rich_help_panel=_RCSD)
]
RecordedTexts = Annotated[
    int | None,
    typer.Option(
        "--recorded-texts",
        min=1,
        help="DPO: most texts that are recorded each time; as many as the steps read unless given.",
        rich_help_panel=_RCSD,
    ),
]
Group = Annotated[
    GroupName, typer.Option("--group", help="GRPO: windows of one place, or whole responses.", rich_help_panel=_RCSD)
]
GroupSize = Annotated[
    int, typer.Option("--group-size", help="GRPO: windows or responses in a group.", rich_help_panel=_RCSD)
]
Credit = Annotated[
    CreditName,
    typer.Option("--credit", help="GRPO: an advantage for each draft, or one for a window.", rich_help_panel=_RCSD),
]
DraftTemperature = Annotated[
    float,
    typer.Option("--draft-temperature", help="GRPO: temperature at which windows are sampled.", rich_help_panel=_RCSD),
]
KLWeight = Annotated[
    float, typer.Option("--kl-weight", help="GRPO: weight of the distance to the start.", rich_help_panel=_RCSD)
]
AnchorWeight = Annotated[
    float | None,
    typer.Option(
        "--anchor-weight",
        help="Weight of the divergence from the target; 0.1 unless given.",
        rich_help_panel=_RCSD,
    ),
]
Continual = Annotated[
    Path | None,
    typer.Option(
        "--continual",
        help="Learn the rounds that a RoundRecorder wrote to this folder; answers to --data are replayed.",
        rich_help_panel=_LIVE,
    ),
]
ReplayShare = Annotated[
    float,
    typer.Option("--replay-share", help="Share of replayed answers among the texts.", rich_help_panel=_LIVE),
]
ReferenceWeight = Annotated[
    float,
    typer.Option(
        "--reference-weight", help="Weight of the divergence from the drafter of --start.", rich_help_panel=_LIVE
    ),
]
Trackers = Annotated[
    str | None,
    typer.Option("--trackers", help="Where accelerate reports loss and tau, e.g. tensorboard,wandb."),
]
