"""Running the arms: every prompt through every arm, in alternating order, each finished row saved at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_specdec.bench.arms import Arm
from hf_specdec.bench.clock import Clock
from hf_specdec.errors import InvalidConfigError
from hf_specdec.stats import SpeculativeStats


__all__ = ["Benchmark", "Row"]


@dataclass(frozen=True)
class Row:
    """One prompt decoded by one arm.

    Args:
        arm, prompt (`str`, `int`): The arm's name and the prompt's number.
        tokens (`list[int]`): The new tokens.
        text (`str`): The new text.
        decode_tokens (`int`): Tokens of the decode phase: what came after the first forward pass (for transformers' own
            assisted decoding, after its first round, which holds both prefills).
        decode_seconds (`float`): Time of the decode phase; the prompts' forward passes are not in it.
        total_seconds (`float`): Time of the whole `generate` call.
        rounds (`list[list]`): `[drafted, emitted, source]` of every round, for arms of this package.
        stats (`dict`): The run's statistics, for arms of this package.
    """

    arm: str
    prompt: int
    tokens: list[int]
    text: str
    decode_tokens: int
    decode_seconds: float
    total_seconds: float
    rounds: list[list[Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Speed of the decode phase."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Benchmark:
    """A benchmark that can be interrupted and resumed.

    Args:
        target, assistant (`PreTrainedModel`): The models; the assistant may be None.
        tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
        prompts (`list[list[int]]`): The token ids of each prompt.
        arms (`list[Arm]`): The arms; `plain` must be among them, for it is what the others are compared with.
        max_new_tokens (`int`): Tokens per prompt; an EOS token ends earlier.
        checkpoint (`Path`, *optional*): Where finished rows are kept, one JSON object a line.
    """

    target: Any
    assistant: Any | None
    tokenizer: Any
    prompts: list[list[int]]
    arms: list[Arm]
    max_new_tokens: int = 128
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not any(arm.is_plain for arm in self.arms):
            raise InvalidConfigError("a benchmark needs the arm plain to compare with")
        if self.assistant is None and (missing := [arm.name for arm in self.arms if arm.needs_draft]):
            raise InvalidConfigError(f"the arms {', '.join(missing)} need a draft model")

    def finished(self) -> list[Row]:
        """Rows of an interrupted run; a line that was cut off by the interruption is dropped."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return []
        rows = []
        for line in self.checkpoint.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(Row(**json.loads(line)))
        known = {arm.name for arm in self.arms}
        return [row for row in rows if row.arm in known and row.prompt < len(self.prompts)]

    def run(self, progress: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """Decodes what is not finished yet, and returns all rows."""
        rows = self.finished()
        self._rewrite(rows)
        done = {(row.arm, row.prompt) for row in rows}
        for arm, prompt in self._order():
            if (arm.name, prompt) not in done:
                row = self.decode(arm, prompt)
                self._append(row)
                rows.append(row)
                progress(row)
        return sorted(rows, key=lambda row: (row.prompt, row.arm))

    def decode(self, arm: Arm, prompt: int) -> Row:
        """One prompt through one arm, greedily."""
        input_ids = torch.tensor([self.prompts[prompt]], device=self.target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        clock, rounds = Clock(), []
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        collected: list[SpeculativeStats] = []
        if arm.config is not None:
            options |= {
                "speculative_config": arm.config,
                "assistant_model": self.assistant if arm.needs_draft else None,
                "stats_callback": collected.append,
                "round_callback": lambda round_: rounds.append(
                    [int(round_.num_drafted[0]), len(round_.emitted[0]), round_.source]
                ),
            }
        else:
            options |= {"stopping_criteria": StoppingCriteriaList([clock])} | self._stock_options(arm)
        started = time.perf_counter()
        sequences = self._generate(arm, inputs, options)
        total = time.perf_counter() - started
        tokens = sequences[0, input_ids.shape[1] :].tolist()
        if collected:
            stats = collected[0]
            decode_tokens, seconds = len(tokens) - 1, stats.total_seconds - stats.prefill_seconds
        else:
            first, last = clock.steps[0], clock.steps[-1]
            decode_tokens, seconds = last[1] - first[1], last[0] - first[0]
        return Row(
            arm=arm.name,
            prompt=prompt,
            tokens=tokens,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            decode_tokens=decode_tokens,
            decode_seconds=seconds,
            total_seconds=total,
            rounds=rounds[1:],
            stats=collected[0].to_dict() if collected else {},
        )

    def _stock_options(self, arm: Arm) -> dict[str, Any]:
        options = dict(arm.stock or {})
        options.pop("num_assistant_tokens", None)
        if options.pop("assistant_model", False):
            options["assistant_model"] = self.assistant
        return options

    def _generate(self, arm: Arm, inputs: Any, options: dict[str, Any]) -> torch.Tensor:
        """Transformers reads the draft length from the assistant's own generation config, which is put back afterwards."""
        length = (arm.stock or {}).get("num_assistant_tokens")
        if length is None or self.assistant is None:
            return self.target.generate(**inputs, **options)
        config = self.assistant.generation_config
        before = {name: getattr(config, name) for name in ("num_assistant_tokens", "assistant_confidence_threshold")}
        config.num_assistant_tokens, config.assistant_confidence_threshold = length, 0.0
        try:
            return self.target.generate(**inputs, **options)
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    def _order(self) -> Iterator[tuple[Arm, int]]:
        for prompt in range(len(self.prompts)):
            for arm in self.arms if prompt % 2 == 0 else reversed(self.arms):
                yield arm, prompt

    def _rewrite(self, rows: list[Row]) -> None:
        if self.checkpoint is not None:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.checkpoint.with_suffix(".unfinished")
            unfinished.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
            os.replace(unfinished, self.checkpoint)

    def _append(self, row: Row) -> None:
        if self.checkpoint is not None:
            with self.checkpoint.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
