"""Runs of several stages: one recipe after another, rounds recorded anew for each stage that learns from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork, EagleDrafter
from hf_specdec.training.checkpoints import latest_checkpoint
from hf_specdec.training.losses import HassLoss
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import RoundBook, read_shards, roll_out
from hf_specdec.training.rcsd.shards import ShardWriter
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.texts import Text, digest_of, observe
from hf_specdec.training.trainer import Observe, StepLog, train


__all__ = ["check_run", "train_in_stages"]

_ABOUT = "about.sha256"  # in a folder of rounds: what they were recorded of


def check_run(
    stages: Sequence[Recipe], options: TrainingOptions, num_processes: int, network: DraftNetwork | None = None
) -> None:
    """Refuses what a run could not do, so that nothing is decoded for it first.

    Args:
        stages (`Sequence[Recipe]`): Its stages.
        options ([`TrainingOptions`]): Length and pace.
        num_processes (`int`): Processes that share it.
        network ([`DraftNetwork`], *optional*): The drafter that it goes on from.

    Raises:
        [`InvalidConfigError`]: If there are fewer steps than stages, the batch cannot be shared evenly, or the loss of the
            first stage is not one for this network.
    """
    if options.max_steps < len(stages):
        raise InvalidConfigError(
            f"max_steps must be at least {len(stages)}, one for each stage, got {options.max_steps}"
        )
    options.check_processes(num_processes)
    if network is not None and isinstance(stages[0].loss, HassLoss) and not isinstance(network, EagleDrafter):
        raise InvalidConfigError(
            f"the HASS loss compares states with the target's features, for which those of a {type(network).__name__} do not "
            "stand in: go on with a drafter of the EAGLE-1 family, or take another recipe"
        )


def train_in_stages(
    target: Any,
    network: DraftNetwork,
    texts: Sequence[Text],
    stages: Sequence[Recipe],
    options: TrainingOptions,
    *,
    out: Path,
    resume: bool = False,
    accelerator: Accelerator | None = None,
    observer: Observe = observe,
    shard: bool = False,
    evaluate: Callable[[], dict[str, float]] | None = None,
    on_step: Callable[[StepLog], None] | None = None,
    on_recorded: Callable[[int, int], None] | None = None,
) -> list[StepLog]:
    """Trains `network` in place by each stage, with an even share of the steps and a cosine of its own. Each stage reads the
    texts that come after those of the stage before it.

    Stages that learn from rounds record them with the drafter as it then is, on the prompts of as many texts as their steps
    read, drawn by the seed and the stage, and train on what was decoded. The frozen reference of a stage is the drafter that
    the stage starts from.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The network, attached to it, in float32.
        texts (`Sequence[Text]`): Texts that the target wrote greedily.
        stages (`Sequence[Recipe]`): The stages.
        options ([`TrainingOptions`]): Length of the whole run, and pace.
        out (`Path`): Folder of checkpoints; a run of several stages has a folder `stage-N` for each.
        resume (`bool`): Whether to go on from what is there.
        accelerator (`Accelerator`, *optional*), observer (`Callable`), shard (`bool`), evaluate (`Callable[[], dict[str,
            float]]`, *optional*): See [`train`].
        on_step (`Callable[[StepLog], None]`, *optional*): Sees each step, numbered through all stages.
        on_recorded (`Callable[[int, int], None]`, *optional*): Called while rounds are recorded, with the number of texts so
            far and of all.

    Returns:
        `list[StepLog]`: The steps of this call.

    Raises:
        [`InvalidConfigError`]: See [`check_run`]; or if what is there to go on from belongs to another run.
    """
    accelerator = accelerator or Accelerator(mixed_precision=options.mixed_precision)
    check_run(stages, options, accelerator.num_processes, network)
    logs: list[StepLog] = []
    fingerprint = digest_of(texts)  # also of stages that train on what was decoded from them
    for number, recipe in enumerate(stages):
        first, share = _share(options, number, len(stages))
        folder = out / f"stage-{number}" if len(stages) > 1 else out
        book = None
        if recipe.rounds and not (resume and _is_finished(folder, share)):
            most = min(share.max_steps * share.batch_size, recipe.recorded_texts or len(texts))
            read = _drawn(texts, most, options.seed * 1_000_003 + number)
            if accelerator.is_main_process:
                _record(target, network, read, recipe, folder / "rounds", resume, on_recorded)
            accelerator.wait_for_everyone()
            book = RoundBook(read_shards(folder / "rounds"))
        train(
            target,
            network,
            texts if book is None else book.texts,
            recipe,
            share,
            out=folder,
            resume=resume,
            accelerator=accelerator,
            steps_before=first,
            fingerprint=fingerprint,
            observer=observer,
            rounds=book,
            shard=shard,
            evaluate=evaluate,
            on_step=_numbered_through(first, logs, on_step),
        )
    return logs


def _share(options: TrainingOptions, number: int, num_stages: int) -> tuple[int, TrainingOptions]:
    """The steps before stage `number`, and its options."""
    first, last = (options.max_steps * each // num_stages for each in (number, number + 1))
    return first, replace(options, max_steps=last - first)


def _numbered_through(
    first: int, logs: list[StepLog], on_step: Callable[[StepLog], None] | None
) -> Callable[[StepLog], None]:
    """Keeps and passes on the steps of a stage, counted from `first`."""

    def shifted(log: StepLog) -> None:
        logs.append(replace(log, step=log.step + first))
        if on_step is not None:
            on_step(logs[-1])

    return shifted


def _drawn(texts: Sequence[Text], most: int, seed: int) -> Sequence[Text]:
    """At most so many of the texts, in their order."""
    if most >= len(texts):
        return texts
    drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:most]
    return [texts[index] for index in sorted(drawn.tolist())]


def _is_finished(folder: Path, options: TrainingOptions) -> bool:
    checkpoint = latest_checkpoint(folder)
    return checkpoint is not None and int(checkpoint.name.partition("-")[2]) == options.max_steps


def _record(
    target: Any,
    network: DraftNetwork,
    texts: Sequence[Text],
    recipe: Recipe,
    folder: Path,
    resume: bool,
    on_recorded: Callable[[int, int], None] | None,
) -> None:
    """Writes the stage's rounds, unless an interrupted run of it recorded them. The folder appears whole."""
    about = digest_of(texts, recipe.num_steps)
    if resume and folder.exists():
        _check_recorded(folder, about)
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for old in (folder, unfinished):
        if old.exists():
            shutil.rmtree(old)
    writer = ShardWriter(unfinished, texts_per_shard=256, max_shards=len(texts))
    for recording in roll_out(target, network, texts, steps=recipe.num_steps, on_batch=on_recorded):
        writer.add(recording)
    writer.flush()
    (unfinished / _ABOUT).write_text(about)
    os.replace(unfinished, folder)


def _check_recorded(folder: Path, about: str) -> None:
    file = folder / _ABOUT
    if file.exists() and file.read_text() != about:
        raise InvalidConfigError(
            f"{folder} holds rounds of other texts, or of other numbers of texts or drafts, than this run would record: resume "
            "with the texts, steps, batch size, seed and recorded_texts as they were, or delete that folder to record anew"
        )
