"""What the experiments on the demo target share: the target's texts, and drafters that are trained once and then loaded."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import mended_lines, write_at_once
from hf_specdec.networks import AutoDrafter, DraftNetwork
from hf_specdec.networks.export import export_drafter
from hf_specdec.placement import device_of
from hf_specdec.quality.drafters.along import drafts_along
from hf_specdec.training.acceptance import measure
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.stages import train_in_stages
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import StepLog
from hf_specdec.warping import whole_law


__all__ = [
    "Show",
    "Workshop",
    "add_plan",
    "bars",
    "history",
    "keep_plan",
    "plan_from",
    "step_logger",
    "target_texts",
    "trained_by",
    "weights_digest",
    "windows",
]

_STEPS = 3  # drafts per round in the middle of training
Show = Callable[[str, int, int], None]  # the name of a part, what is done of it, and all there is of it


@dataclass(kw_only=True)
class Workshop:
    """Trains drafters, unless their folders hold them already.

    Args:
        target (`PreTrainedModel`): The target.
        batch_size (`int`): Texts of an optimiser step.
        progress (`Callable[[str, int, int], None]`): Called after every step.
        prompts (`list[list[int]]`): Prompts whose acceptance length is measured in the middle of training; none by default.
        held_out (`list[Text]`): What the target writes to these prompts; read along at the same steps.
        measured_tokens (`int`): How far each is continued.
        evaluate_every (`int`): Steps between measurements.
        kept ([`KeptFeatures`]): The target's features of all texts so far.
    """

    target: Any
    batch_size: int
    progress: Show
    prompts: list[list[int]] = field(default_factory=list)
    held_out: list[Text] = field(default_factory=list)
    measured_tokens: int = 128
    evaluate_every: int = 250
    kept: KeptFeatures = field(default_factory=KeptFeatures)

    def drafter(
        self,
        folder: Path,
        start: Path | None,
        texts: Sequence[Text],
        recipes: Sequence[Recipe],
        *,
        steps: int,
        rate: float,
        seed: int,
    ) -> DraftNetwork:
        """The drafter of a folder, trained if it is not there.

        Args:
            folder (`Path`): Receives checkpoints, `log.jsonl` and the drafter.
            start (`Path`, *optional*): The drafter to go on from; a new one otherwise.
            texts (`Sequence[Text]`): Texts that the target wrote.
            recipes (`Sequence[Recipe]`): The stages.
            steps (`int`): Optimiser steps of all stages together.
            rate (`float`): Highest learning rate.
            seed (`int`): Of the order of texts, and of a new drafter's weights.
        """
        folder.mkdir(exist_ok=True)
        if (folder / "config.json").exists():
            return AutoDrafter.from_pretrained(folder, target=self.target)
        if start is None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                network = AutoDrafter.from_target(self.target, recipes[0].family, dtype=torch.float32)
        else:
            network = AutoDrafter.from_pretrained(start, target=self.target, dtype=torch.float32)
        options = TrainingOptions(
            max_steps=steps,
            batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
            learning_rate=rate,
            warmup=0.03,
            eval_every=self.evaluate_every,
            save_every=100,
            seed=seed,
        )
        train_in_stages(
            self.target,
            network,
            texts,
            recipes,
            options,
            out=folder,
            resume=True,
            observer=self.kept,
            evaluate=(lambda: self._evaluation(network)) if self.prompts else None,
            on_step=step_logger(folder / "log.jsonl", lambda log: self.progress(folder.name, log.step, steps)),
        )
        export_drafter(network, folder)
        return network

    def _evaluation(self, network: DraftNetwork) -> dict[str, float]:
        """`tau` by decoding, and along the held-out texts the divergence of first drafts and the share that is accepted."""
        found = measure(
            self.target, network, self.prompts, steps=_STEPS, max_new_tokens=self.measured_tokens, batch_size=32
        )
        figures = {"tau": sum(each.tau for each in found) / len(found)}
        if self.held_out:
            along = drafts_along(self.target, network, self.held_out, steps=_STEPS, observer=self.kept)
            figures |= {"kl": along.kl, "acceptance": along.rate}
        return figures


def add_plan(parser: argparse.ArgumentParser, plan: Any) -> None:
    """An option for each number, word and seed of a plan, with its value as default.

    Args:
        parser (`argparse.ArgumentParser`): Receives them.
        plan (`Any`): A frozen dataclass with a field `seeds`.
    """
    for name, value in asdict(plan).items():
        if isinstance(value, int | float | str):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(plan.seeds))


def plan_from(given: Mapping[str, Any], plan: Any) -> Any:
    """The plan that the options of [`add_plan`] ask for.

    Args:
        given (`Mapping[str, Any]`): What the parser found.
        plan (`Any`): The plan that the options were made from.
    """
    known = {name: given[name] for name in asdict(plan) if name in given}
    return replace(plan, **known | {"seeds": tuple(given["seeds"])})


def weights_digest(drafter: Path) -> str:
    """A digest of the weights in the folder of a drafter (`Path`)."""
    return hashlib.sha256((drafter / "model.safetensors").read_bytes()).hexdigest()[:16]


def trained_by(plan: Any, measured_only: Collection[str]) -> dict[str, Any]:
    """What of a plan its drafters depend on: all (`dict`) but the fields that only say how they are measured."""
    return {name: value for name, value in asdict(plan).items() if name not in measured_only}


def keep_plan(file: Path, asked: dict[str, Any], *, later: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Keeps what a folder's texts and drafters depend on, and refuses to go on with anything else.

    Args:
        file (`Path`): Where it stands.
        asked (`dict`): What is asked for now.
        later (`Mapping[str, Any]`, *optional*): What runs did before they were told, of options that came later.

    Raises:
        [`InvalidConfigError`]: If the folder holds what was trained by another plan.
    """
    asked = json.loads(json.dumps(asked))
    known = dict(later) | json.loads(file.read_text()) if file.exists() else asked
    if known != asked:
        changed = [f"{name} {known.get(name)}, now {asked[name]}" for name in asked if known.get(name) != asked[name]]
        raise InvalidConfigError(
            f"{file.parent} was trained with {'; '.join(changed)}: go on with the same plan, or write to another folder"
        )
    file.write_text(json.dumps(asked, indent=1) + "\n")


def windows(ids: torch.Tensor, count: int, length: int) -> list[list[int]]:
    """Evenly spread windows of a corpus.

    Args:
        ids (`torch.LongTensor` of shape `(tokens,)`): The corpus.
        count (`int`), length (`int`): How many windows, and how long.

    Raises:
        [`InvalidConfigError`]: If the corpus is shorter than a window.
    """
    if len(ids) < length:
        raise InvalidConfigError(f"the text has {len(ids)} tokens, and a prompt is to have {length}: pass more text")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return [ids[start : start + length].tolist() for start in starts]


@torch.no_grad()
def target_texts(
    target: Any,
    prompts: Sequence[Sequence[int]],
    file: Path,
    *,
    new_tokens: int,
    progress: Callable[[int, int], None],
    temperature: float = 0.0,
    batch_size: int = 128,
) -> list[Text]:
    """The target's continuations, written down as they come; a text ends with its end token.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Token ids, all of one length.
        file (`Path`): JSON lines of token ids; what is there is not written again.
        new_tokens (`int`): Longest continuation.
        progress (`Callable[[int, int], None]`): Called with the number of texts so far and of all.
        temperature (`float`): 0 decodes greedily; above it, the whole law is sampled, each batch with dice of its own.
        batch_size (`int`): Texts decoded at once.

    Raises:
        [`InvalidConfigError`]: If the file holds texts on other prompts.
    """
    rows = _whole_batches(file, len(prompts), batch_size)
    width, end = len(prompts[0]), target.generation_config.eos_token_id
    if any(row[:width] != list(prompt) for row, prompt in zip(rows, prompts, strict=False)):
        raise InvalidConfigError(f"{file} holds texts on other prompts: write to another folder")
    with file.open("a") as lines:
        for first in range(len(rows), len(prompts), batch_size):
            ids = torch.tensor(
                [list(prompt) for prompt in prompts[first : first + batch_size]], device=device_of(target)
            )
            with torch.random.fork_rng():
                torch.manual_seed(first)
                found = target.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    **whole_law(temperature),
                )
            for row in found.tolist():
                answer = row[width:]
                kept = answer[: answer.index(end) + 1] if end in answer else answer
                rows.append(row[:width] + kept)
                lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()
            progress(len(rows), len(prompts))
    return [Text(tuple(row), width) for row in rows]


def _whole_batches(file: Path, count: int, batch_size: int) -> list[list[int]]:
    """What the file holds, without a batch that a killed run left in part, whose dice would be thrown anew from its middle."""
    lines = mended_lines(file)
    whole = len(lines) if len(lines) >= count else len(lines) - len(lines) % batch_size
    if whole < len(lines):
        write_at_once(file, "".join(f"{line}\n" for line in lines[:whole]).encode())
    return [json.loads(line) for line in lines[:whole]]


def step_logger(file: Path, show: Callable[[StepLog], None] = lambda log: None) -> Callable[[StepLog], None]:
    """Writes a line for each step, and shows it. Half a line that a killed run left is taken away first."""
    mended_lines(file)

    def write(log: StepLog) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(log)) + "\n")
        show(log)

    return write


def history(folder: Path) -> list[dict[str, float]]:
    """Step, tau and whatever else was found by every evaluation of a run, which show its plateau."""
    logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    latest = {log["step"]: log for log in logs}  # a killed run repeats the steps since its checkpoint
    return [{"step": step, **log["evaluation"]} for step, log in sorted(latest.items()) if log["evaluation"]]


def bars() -> tuple[Progress, Show]:
    """Bars on the terminal, one for each part from when it begins; and what moves them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True))
    known: dict[str, TaskID] = {}

    def show(part: str, done: int, total: int) -> None:
        if part not in known:
            known[part] = shown.add_task(part, total=total)
        shown.update(known[part], completed=done, total=total)

    return shown, show
