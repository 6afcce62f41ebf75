"""Running a quality measurement: every question through every arm, in batches, each finished batch kept at once."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_specdec.bench.arms import Arm
from hf_specdec.bench.batched import eos_token_ids, until_end
from hf_specdec.bench.clock import Clock
from hf_specdec.configs import BaseConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.placement import device_of
from hf_specdec.quality.arms import CONTROL, MATCHED, random_arm, throws_dice
from hf_specdec.quality.control import RandomRejection
from hf_specdec.quality.gsm8k import judge_number
from hf_specdec.quality.judging import Item, Judge
from hf_specdec.quality.rows import Batch, Row, RowsFile
from hf_specdec.sequences import pad_left
from hf_specdec.stats import RowStats, SpeculativeStats
from hf_specdec.timing import wait_for
from hf_specdec.warping import whole_law


__all__ = ["Evaluation", "changed_rate", "row_seed"]


@dataclass(frozen=True)
class _Task:
    arm: Arm
    seed: int
    number: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm.name, self.seed, self.number


@dataclass
class Evaluation:
    """A measurement that can be interrupted and resumed.

    Args:
        target, assistant (`PreTrainedModel`): The models; the assistant may be None where no arm drafts with it.
        tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
        questions (`list[Item]`): The questions.
        prompts (`list[list[int]]`): The token ids of their prompts.
        arms (`list[Arm]`): The arms, see [`parse_quality_arms`].
        file ([`RowsFile`]): Where finished batches are kept.
        batch_size (`int`): Questions that are decoded together.
        max_new_tokens (`int`): Tokens per answer; an EOS token ends earlier.
        temperature (`float`): 0 decodes greedily; then only arms that throw dice are run for each seed.
        seeds (`list[int]`): Seeds of the dice.
        length (`int`): Tokens to draft per round, for the control.
        judge (`Callable[[Item, str], Judgement]`): What decides whether a text answers its question.
        measures_tv (`bool`): Whether each batch of a relaxed arm is decoded once more, off the clock, to measure how far its
            law is from the target's.
    """

    target: Any
    assistant: Any | None
    tokenizer: Any
    questions: Sequence[Item]
    prompts: list[list[int]]
    arms: list[Arm]
    file: RowsFile
    batch_size: int = 32
    max_new_tokens: int = 220
    temperature: float = 0.0
    seeds: tuple[int, ...] = (0,)
    length: int = 5
    judge: Judge = judge_number
    measures_tv: bool = False

    def __post_init__(self) -> None:
        if self.assistant is None and (missing := [arm.name for arm in self.arms if arm.needs_draft]):
            raise InvalidConfigError(f"the arms {', '.join(missing)} need a draft model: pass --assistant")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidConfigError(f"seeds must be one or more different numbers, got {list(self.seeds)}")
        by_length = sorted(range(len(self.prompts)), key=lambda place: (len(self.prompts[place]), place))
        self.batches = [by_length[i : i + self.batch_size] for i in range(0, len(by_length), self.batch_size)]

    def run(self, progress: Callable[[int, int, Batch | None], None] = lambda done, total, batch: None) -> list[Batch]:
        """Decodes what is not finished yet, and returns all batches.

        Args:
            progress (`Callable`, *optional*): Called with the number of finished batches, of all batches, and the batch that
                has just been finished (None at the start).
        """
        tasks = list(self._tasks())
        done = sum(task.key in self.file.batches for task in tasks)
        progress(done, len(tasks), None)
        for task in tasks:
            if task.key not in self.file.batches:
                batch = self.decode(task.arm, task.seed, task.number)
                self.file.add(batch)
                done += 1
                progress(done, len(tasks), batch)
        return [self.file.batches[task.key] for task in tasks]

    def finished(self) -> list[Batch]:
        """The batches that are there, of the arms and seeds asked for."""
        keys = [task.key for task in self._tasks()]
        return [self.file.batches[key] for key in keys if key in self.file.batches]

    @torch.no_grad()
    def decode(self, arm: Arm, seed: int, number: int) -> Batch:
        """One batch of questions through one arm."""
        if arm.name == CONTROL:
            arm = random_arm(CONTROL, self._matched_rate(), self.length)
        places = self.batches[number]
        inputs = pad_left([self.prompts[place] for place in places], self._pad_token_id(), device_of(self.target))
        seeds = [row_seed(seed, self.questions[place].index) for place in places]
        clock, found = Clock(), list[SpeculativeStats]()
        started = time.perf_counter()
        if arm.procedure is not None:
            return self._by_procedure(arm, seed, number)
        if arm.config is None:
            with torch.random.fork_rng():
                torch.manual_seed(seeds[0])
                sequences = self.target.generate(
                    **inputs, **self._options(), stopping_criteria=StoppingCriteriaList([clock])
                )
        else:
            sequences = self._speculate(arm, arm.config, inputs, seeds, found)
        wait_for(sequences.device)
        seconds = time.perf_counter() - started
        prefill = found[0].prefill_seconds if found else clock.steps[0][0] - started
        counts = [_counts(row) for row in found[0].rows] if found else [{} for _ in places]
        if arm.config is not None and self.measures_tv and not arm.config.rule.lossless:
            measured = list[SpeculativeStats]()
            self._speculate(arm, replace(arm.config, diagnostics=True), inputs, seeds, measured)
            counts = [each | _distances(row) for each, row in zip(counts, measured[0].rows, strict=True)]
        new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        rows = [self._row(place, *each) for place, *each in zip(places, new, counts, strict=True)]
        return Batch(arm.name, seed, number, rows, seconds, seconds - prefill, _rate(arm))

    def _speculate(
        self, arm: Arm, config: BaseConfig, inputs: dict[str, Any], seeds: list[int], found: list[SpeculativeStats]
    ) -> Any:
        return self.target.generate(
            **inputs,
            **self._options(),
            speculative_config=config,
            assistant_model=self.assistant if arm.needs_draft else None,
            stats_callback=found.append,
            row_seeds=seeds,
        )

    def _by_procedure(self, arm: Arm, seed: int, number: int) -> Batch:
        """One question after another; the time of the prompts' forward passes is not told apart."""
        if self.temperature > 0 or arm.procedure is None:
            raise InvalidConfigError(f"the arm {arm.name} decodes greedily: leave out --temperature")
        started, rows = time.perf_counter(), []
        for place in self.batches[number]:
            tokens, counts = arm.procedure.answer(
                self.target, self.assistant, self.tokenizer, self.prompts[place], max_new_tokens=self.max_new_tokens,
                ends=eos_token_ids(self.target), options=self._options(),
            )  # fmt: skip
            rows.append((place, tokens, counts))
        seconds = time.perf_counter() - started
        return Batch(arm.name, seed, number, [self._row(*each) for each in rows], seconds, seconds)

    def _tasks(self) -> Iterator[_Task]:
        """Batches in a shuffled order, so that an interrupted run is no sample of short questions; all arms of a batch one
        after another, in alternating order; the control last, for its rate is measured before."""
        order = list(range(len(self.batches)))
        random.Random(0).shuffle(order)
        first = [arm for arm in self.arms if arm.name != CONTROL]
        last = [arm for arm in self.arms if arm.name == CONTROL]
        for arms in (first, last):
            for turn, seed in enumerate(self.seeds):
                for place, number in enumerate(order):
                    for arm in arms if place % 2 == 0 else arms[::-1]:
                        if turn == 0 or self.temperature > 0 or throws_dice(arm):
                            yield _Task(arm, seed, number)

    def _matched_rate(self) -> float:
        """The control's rate; once it has been used it stays, also where seeds are added later."""
        batches = self.file.batches.values()
        used = [batch.rate for batch in batches if batch.arm == CONTROL and batch.rate is not None]
        return used[0] if used else changed_rate([batch for batch in batches if batch.arm == MATCHED])

    def _options(self) -> dict[str, Any]:
        """Options of `generate`. A checkpoint's own penalties and filters are switched off: the law is the model's."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": self._pad_token_id(),
            "repetition_penalty": 1.0,
            **whole_law(self.temperature),
        }

    def _pad_token_id(self) -> int:
        return 0 if self.tokenizer.pad_token_id is None else int(self.tokenizer.pad_token_id)

    def _row(self, place: int, tokens: list[int], counts: dict[str, float]) -> Row:
        question, eos = self.questions[place], eos_token_ids(self.target)
        tokens = until_end(tokens, eos)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        judgement = self.judge(question, text)
        return Row(
            question=question.index,
            tokens=tokens,
            text=text,
            answer=judgement.answer,
            correct=judgement.correct,
            ended=bool(tokens) and tokens[-1] in eos,
            counts=counts,
        )


def _distances(row: RowStats) -> dict[str, float]:
    """What diagnostics add to the counts of a row."""
    known = {"tv_steps": row.num_known_steps, "tv_unknown": row.num_unknown_steps, "tv_total": row.total_step_tv}
    largest = {} if row.max_step_tv is None else {"tv_max": row.max_step_tv}
    return known | largest | {name: row.events[name] for name in ("rescued", "rejected", "changed")}


def row_seed(seed: int, question: int) -> int:
    """The seed of a question's dice; neither the batch nor the order of work matters."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{question}".encode()).digest()[:7], "big")


def changed_rate(batches: list[Batch]) -> float:
    """`changed / (accepted + changed)`: how often EASD changes a token where the exact rule would have kept the draft.

    Raises:
        [`InvalidConfigError`]: If the arm reached no such position, so that there is nothing to match.
    """
    counts = [row.counts for batch in batches for row in batch.rows]
    changed = sum(each.get("easd_changed_token", 0) for each in counts)
    kept = sum(each["num_accepted_tokens"] for each in counts) + changed
    if kept == 0:
        raise InvalidConfigError(f"the arm {MATCHED} reached no aligned draft: give the control a rate, {CONTROL}-RATE")
    return changed / kept


def _rate(arm: Arm) -> float | None:
    rule = None if arm.config is None else arm.config.rule
    return rule.rate if isinstance(rule, RandomRejection) else None


def _counts(row: RowStats) -> dict[str, float]:
    names = ("num_rounds", "num_draft_tokens", "num_verified_tokens", "num_accepted_tokens", "num_new_tokens")
    return {name: getattr(row, name) for name in names} | dict(row.events)
