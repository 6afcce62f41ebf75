"""RCSD's claim on the bundled demo target: `python -m hf_specdec.quality.drafters.reproduction --docs docs.jsonl --out FOLDER`.

HASS is trained on text that the target writes greedily, then DPO, GRPO and a control of the same number of tokens each go on
from it, with each seed. All are measured on prompts of held-out documents. A killed run continues when started again with the
same arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import Pair, load_pair
from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import mended_lines
from hf_specdec.networks import AutoDrafter, DraftNetwork
from hf_specdec.networks.export import export_drafter
from hf_specdec.quality.drafters.comparison import compare, compare_drafters
from hf_specdec.quality.drafters.report import write_report
from hf_specdec.training.acceptance import measure
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.losses import KLLoss
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import RCSDTraining
from hf_specdec.training.recipes import RECIPES, Recipe, stages_of
from hf_specdec.training.stages import train_in_stages
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import StepLog


__all__ = ["Plan", "reproduce", "step_logger", "windows"]

Show = Callable[[str, int, int], None]

_MEASURED_ONLY = ("held_out", "measured_tokens", "steps", "seeds", "evaluate_every")  # drafters do not depend on them


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything.

    Args:
        texts (`int`): Texts to train on, of `prompt_tokens` of the corpus and `new_tokens` of the target.
        hass_steps, stage_steps (`int`): Optimiser steps of HASS, and of what goes on from it.
        hass_rate, stage_rate (`float`): Highest learning rates.
        held_out (`int`): Prompts that are measured, each continued by `measured_tokens`.
        steps (`tuple[int, ...]`): Drafts per round that are measured.
        seeds (`tuple[int, ...]`): Seeds of the stages after HASS.
    """

    texts: int = 2048
    prompt_tokens: int = 32
    new_tokens: int = 160
    hass_steps: int = 3000
    hass_rate: float = 3e-3
    stage_steps: int = 500
    stage_rate: float = 3e-4
    batch_size: int = 8
    held_out: int = 96
    measured_tokens: int = 128
    steps: tuple[int, ...] = (3, 4, 5, 6)
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluate_every: int = 250


def reproduce(
    pair: Pair,
    docs: Path,
    out: Path,
    report: Path,
    plan: Plan,
    *,
    options: RCSDTraining | None = None,
    library: Path | None = None,
    progress: Show = lambda part, done, total: None,
) -> dict[str, Any]:
    """Trains what is not trained yet, measures everything, and writes the report.

    Args:
        pair ([`Pair`]): The demo pair; its target is used.
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`.
        out (`Path`): Folder of texts, checkpoints and drafters.
        report (`Path`): The report's path without an ending.
        plan ([`Plan`]): How much of everything.
        options ([`RCSDTraining`], *optional*): How the RCSD stages are to be done.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
        progress (`Callable[[str, int, int], None]`, *optional*): Called with the name of a part, what is done of it, and all
            there is of it.

    Raises:
        [`InvalidConfigError`]: If `out` holds what was trained by another plan.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_training(out / "plan.json", plan, options or RCSDTraining())
    training, held_out = (tokenizer.encode_all(pair.tokenizer, side) for side in corpus.load(docs, library))
    prompts = windows(held_out, plan.held_out, plan.prompt_tokens)
    asked = windows(training, plan.texts, plan.prompt_tokens)
    texts = _texts(pair.target, asked, out / "texts.jsonl", plan, partial(progress, "texts"))
    workshop = _Workshop(pair, texts, prompts, plan, progress)
    hass = workshop.drafter(out / "hass", None, [RECIPES["hass"]], plan.hass_steps, plan.hass_rate, seed=0)
    stages = {name: stages_of(name, options) for name in ("rcsd-dpo", "rcsd-grpo")}
    stages["control"] = [Recipe("eagle", KLLoss(), num_steps=6, detach=False)]
    drafters: dict[str, Sequence[DraftNetwork]] = {"hass": [hass]}
    for name, recipes in stages.items():
        drafters[name] = [
            workshop.drafter(
                out / f"{name}-{seed}", out / "hass", recipes, plan.stage_steps, plan.stage_rate, seed=seed
            )
            for seed in plan.seeds
        ]
    arms = compare_drafters(
        pair.target, drafters, prompts, steps=plan.steps, max_new_tokens=plan.measured_tokens, batch_size=32,
        progress=partial(progress, "measuring"),
    )  # fmt: skip
    found = compare(arms, baseline="hass", control="control")
    about = {"seeds": list(plan.seeds), "plan": asdict(plan), "rcsd": asdict(options or RCSDTraining())}
    write_report(report, found, model="demo", dataset="pydocs", about={**about, "hass_history": _history(out / "hass")})
    return found


def _same_training(file: Path, plan: Plan, options: RCSDTraining) -> None:
    """Keeps what the folder's texts and drafters depend on, and refuses to go on with anything else."""
    asked = {name: value for name, value in asdict(plan).items() if name not in _MEASURED_ONLY} | asdict(options)
    asked = json.loads(json.dumps(asked))
    known = json.loads(file.read_text()) if file.exists() else asked
    if known != asked:
        changed = [f"{name} {known.get(name)}, now {asked[name]}" for name in asked if known.get(name) != asked[name]]
        raise InvalidConfigError(
            f"{file.parent} was trained with {'; '.join(changed)}: go on with the same plan, or write to another folder"
        )
    file.write_text(json.dumps(asked, indent=1) + "\n")


@dataclass
class _Workshop:
    """What every training run shares."""

    pair: Pair
    texts: list[Text]
    prompts: list[list[int]]
    plan: Plan
    progress: Show

    def __post_init__(self) -> None:
        self.kept = KeptFeatures()

    def drafter(
        self, folder: Path, start: Path | None, recipes: Sequence[Recipe], steps: int, rate: float, seed: int
    ) -> DraftNetwork:
        """The drafter of a folder, trained if it is not there."""
        target = self.pair.target
        folder.mkdir(exist_ok=True)
        if (folder / "config.json").exists():
            return AutoDrafter.from_pretrained(folder, target=target)
        if start is None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                network = AutoDrafter.from_target(target, recipes[0].family, dtype=torch.float32)
        else:
            network = AutoDrafter.from_pretrained(start, target=target, dtype=torch.float32)
        options = TrainingOptions(
            max_steps=steps,
            batch_size=self.plan.batch_size,
            micro_batch_size=self.plan.batch_size,
            learning_rate=rate,
            warmup=0.03,
            eval_every=self.plan.evaluate_every,
            save_every=100,
            seed=seed,
        )
        train_in_stages(
            target,
            network,
            self.texts,
            recipes,
            options,
            out=folder,
            resume=True,
            observer=self.kept,
            evaluate=lambda: self._tau(network),
            on_step=step_logger(folder / "log.jsonl", lambda log: self.progress(folder.name, log.step, steps)),
        )
        export_drafter(network, folder)
        return network

    def _tau(self, network: DraftNetwork) -> dict[str, float]:
        """The acceptance length of some prompts, in the middle of training."""
        found = measure(
            self.pair.target,
            network,
            self.prompts[::3],
            steps=3,
            max_new_tokens=self.plan.measured_tokens,
            batch_size=32,
        )
        return {"tau": sum(each.tau for each in found) / len(found)}


def windows(ids: torch.Tensor, count: int, length: int) -> list[list[int]]:
    """Evenly spread windows of a corpus."""
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return [ids[start : start + length].tolist() for start in starts]


@torch.no_grad()
def _texts(
    target: Any,
    prompts: list[list[int]],
    file: Path,
    plan: Plan,
    progress: Callable[[int, int], None],
    batch_size: int = 128,
) -> list[Text]:
    """The target's greedy texts, written down as they come; a text ends with its end token."""
    rows = [json.loads(line) for line in mended_lines(file)]
    end = target.generation_config.eos_token_id
    with file.open("a") as lines:
        for first in range(len(rows), len(prompts), batch_size):
            ids = torch.tensor(prompts[first : first + batch_size])
            found = target.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=plan.new_tokens, do_sample=False
            )
            for row in found.tolist():
                answer = row[plan.prompt_tokens :]
                kept = answer[: answer.index(end) + 1] if end in answer else answer
                rows.append(row[: plan.prompt_tokens] + kept)
                lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()
            progress(len(rows), len(prompts))
    return [Text(tuple(row), plan.prompt_tokens) for row in rows]


def step_logger(file: Path, show: Callable[[StepLog], None] = lambda log: None) -> Callable[[StepLog], None]:
    """Writes a line for each step, and shows it. Half a line that a killed run left is taken away first."""
    mended_lines(file)

    def write(log: StepLog) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(log)) + "\n")
        show(log)

    return write


def _history(folder: Path) -> list[dict[str, float]]:
    """Step and tau of every evaluation of a run, which show its plateau."""
    file = folder / "log.jsonl"
    logs = [json.loads(line) for line in file.read_text().splitlines()]
    latest = {log["step"]: log for log in logs}  # a killed run repeats the steps since its checkpoint
    return [{"step": step, **log["evaluation"]} for step, log in sorted(latest.items()) if log["evaluation"]]


def _bars(bars: Progress) -> Show:
    """A bar for each part, from when it begins."""
    known: dict[str, TaskID] = {}

    def show(part: str, done: int, total: int) -> None:
        if part not in known:
            known[part] = bars.add_task(part, total=total)
        bars.update(known[part], completed=done, total=total)

    return show


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="JSON lines with the fields id and text")
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, checkpoints and drafters")
    parser.add_argument("--report", type=Path, default=Path("docs/results/rcsd"), help="the report, without an ending")
    parser.add_argument("--threads", type=int, default=1)
    numbers = {name: value for name, value in asdict(Plan()).items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--recorded-texts", type=int, help="texts that DPO records each time")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(Plan().seeds))
    given = vars(parser.parse_args())
    torch.set_num_threads(given["threads"])
    plan = Plan(seeds=tuple(given["seeds"]), **{name: given[name] for name in numbers})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        reproduce(
            load_pair(),
            given["docs"],
            given["out"],
            given["report"],
            plan,
            options=RCSDTraining(recorded_texts=given["recorded_texts"]),
            progress=_bars(bars),
        )


if __name__ == "__main__":
    _main()
