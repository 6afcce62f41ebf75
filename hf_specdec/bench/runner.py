"""Running the arms: every prompt, or batch of prompts, through every arm in alternating order; finished rows are kept."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_specdec.bench.arms import Arm, check_arms
from hf_specdec.bench.batched import eos_token_ids, recorded_round, row_rounds, until_end
from hf_specdec.bench.clock import Clock
from hf_specdec.bench.cost_log import CostLog
from hf_specdec.bench.economize import EconomizeRun
from hf_specdec.bench.memory import PeakMemory
from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import whole_lines, write_at_once
from hf_specdec.networks import DraftNetwork
from hf_specdec.placement import device_of
from hf_specdec.records import Round
from hf_specdec.sequences import pad_left
from hf_specdec.stats import SpeculativeStats
from hf_specdec.timing import wait_for
from hf_specdec.warping import whole_law


__all__ = ["Benchmark", "Row"]


@dataclass(frozen=True)
class Row:
    """One call of an arm: a prompt, or a batch of prompts.

    Args:
        arm, prompt (`str`, `int`): The arm's name and the prompt's number; in batches, the batch's number.
        tokens (`list[int]`): The new tokens; those of a batch's rows one after another, each up to its EOS.
        text (`str`): The new text; that of a batch's rows line by line.
        decode_tokens (`int`): Tokens of the decode phase: what came after the first forward pass (for transformers' own
            assisted decoding, after its first round, which holds both prefills).
        decode_seconds (`float`): Time of the decode phase; the prompts' forward passes are not in it.
        decode_rounds (`int`): Target passes of the decode phase.
        total_seconds (`float`): Time of the whole `generate` call.
        peak_memory (`int`, *optional*): The most bytes in use during the call, see [`PeakMemory`].
        rounds (`list[list]`): `[drafted, emitted, source, parts]` of every round, for arms of this package; `parts` lists
            `[source, tokens]` from left to right, with `ngram` for matches of any size.
            In a batch, as the whole batch pays for it, see [`recorded_round`].
        stats (`dict`): The run's statistics, for arms of this package.
        batch (`list[list[int]]`): The new tokens of each row of a batch; empty for a single prompt.
        row_rounds (`list[list[list]]`): Like `rounds`, for each row of a batch.
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
    decode_rounds: int = 0
    batch: list[list[int]] = field(default_factory=list)
    row_rounds: list[list[list[Any]]] = field(default_factory=list)
    peak_memory: int | None = None

    @property
    def prefill_seconds(self) -> float:
        """Time before the decode phase: the prompts' forward passes, and what `generate` prepares."""
        return self.total_seconds - self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Speed of the decode phase."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Benchmark:
    """A benchmark that can be interrupted and resumed.

    Args:
        target, assistant (`PreTrainedModel`): The models; the assistant may be a drafter network, or None.
        tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
        prompts (`list[list[int]]`): The token ids of each prompt.
        arms (`list[Arm]`): The arms; `plain` must be among them, for it is what the others are compared with.
        max_new_tokens (`int`): Tokens per prompt; an EOS token ends earlier.
        temperature (`float`, *optional*): Samples at this temperature, without top-k and top-p; greedy by default.
        seed (`int`): When sampling, each prompt's dice start from `seed` plus its number. The global generator is put back.
        checkpoint (`Path`, *optional*): Where finished rows are kept, one JSON object a line.
        batch_size (`int`): Prompts that are decoded together. Transformers' assisted decoding and the peers take one.
        costs ([`CostLog`], *optional*): Is measured before each prompt and after the last.
    """

    target: Any
    assistant: Any | None
    tokenizer: Any
    prompts: list[list[int]]
    arms: list[Arm]
    max_new_tokens: int = 128
    checkpoint: Path | None = None
    temperature: float | None = None
    seed: int = 0
    batch_size: int = 1
    costs: CostLog | None = None
    _peers: dict[str, EconomizeRun] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_arms(self.arms, has_draft=self.assistant is not None, batch_size=self.batch_size)
        if isinstance(self.assistant, DraftNetwork):
            self._refuse_for_networks(self.assistant)
        elif trees := [arm.name for arm in self.arms if arm.config is not None and arm.config.tree_shape is not None]:
            raise InvalidConfigError(
                f"the arms {', '.join(trees)} draft trees, which needs a drafter network, got {type(self.assistant).__name__}"
            )
        if self.temperature is not None and not self.temperature > 0.0:
            raise InvalidConfigError(f"temperature must be above 0 (None is greedy), got {self.temperature}")
        self.batches = [
            self.prompts[first : first + self.batch_size] for first in range(0, len(self.prompts), self.batch_size)
        ]

    def _refuse_for_networks(self, network: DraftNetwork) -> None:
        needing = [arm for arm in self.arms if arm.needs_draft]
        if others := [arm.name for arm in needing if arm.config is None or arm.config.draft_vocabulary is not None]:
            raise InvalidConfigError(
                f"the arms {', '.join(others)} need a causal LM as draft model, got the drafter network "
                f"{type(network).__name__}: leave them out, as in --arms plain,default,model-5"
            )

    def finished(self) -> list[Row]:
        """Rows of an interrupted run, of prompts that every arm has decoded: times of two processes do not compare, so a prompt
        that lacks an arm is decoded anew by all. A line that was cut off by the interruption is dropped."""
        lines = [] if self.checkpoint is None else whole_lines(self.checkpoint)
        rows = [Row(**json.loads(line)) for line in lines]
        known = {arm.name for arm in self.arms}
        found = Counter(row.prompt for row in rows if row.arm in known)
        return [
            row
            for row in rows
            if row.arm in known and found[row.prompt] == len(known) and row.prompt < len(self.batches)
        ]

    def run(self, progress: Callable[[Row], None] = lambda row: None) -> list[Row]:
        """Decodes what is not finished yet, and returns all rows."""
        rows = self.finished()
        self._rewrite(rows)
        done = {row.prompt for row in rows}
        if self.costs is not None:
            for prompt in {*range(len(self.batches))} - done:
                self.costs.forget(prompt)
        for arm, prompt in self._order():
            if prompt not in done:
                if self.costs is not None:
                    self.costs.measure(prompt)
                row = self.decode(arm, prompt)
                self._append(row)
                rows.append(row)
                progress(row)
        if self.costs is not None:
            self.costs.complete(len(self.batches))
        return sorted(rows, key=lambda row: (row.prompt, row.arm))

    def decode(self, arm: Arm, prompt: int) -> Row:
        """One prompt, or one batch of them, through one arm."""
        if arm.economize is not None and arm.name not in self._peers:
            self._peers[arm.name] = EconomizeRun(arm.economize, self.target, self.assistant, self.temperature)
        device = device_of(self.target)
        inputs = pad_left(self.batches[prompt], self._pad_token_id(), device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if self.temperature is not None:
                torch.manual_seed(self.seed + prompt)
            wait_for(device)
            memory, started = PeakMemory(device), time.perf_counter()
            decode = self._ours if arm.config is not None else self._theirs if arm.economize is None else self._peer
            tokens, phase = decode(arm, prompt, inputs)
            wait_for(device)
            total = time.perf_counter() - started
        if self.batch_size > 1:
            phase["batch"] = tokens
        return Row(
            arm=arm.name,
            prompt=prompt,
            tokens=[token for row in tokens for token in row],
            text="\n".join(self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens),
            total_seconds=total,
            peak_memory=memory.read(),
            **phase,
        )

    def _ours(self, arm: Arm, prompt: int, inputs: dict[str, torch.Tensor]) -> tuple[list[list[int]], dict[str, Any]]:
        collected: list[SpeculativeStats] = []
        rounds: list[Round] = []
        sequences = self.target.generate(
            **self._options(inputs),
            speculative_config=arm.config,
            assistant_model=self.assistant if arm.needs_draft else None,
            stats_callback=collected.append,
            round_callback=rounds.append,
        )
        tokens, stats = self._new_tokens(sequences, inputs), collected[0]
        decoded = rounds[1:]
        return tokens, {
            "decode_tokens": _num_after_first(tokens),
            "decode_seconds": stats.total_seconds - stats.prefill_seconds,
            "decode_rounds": len(decoded),
            "rounds": [recorded_round(each) for each in decoded],
            "stats": stats.to_dict(),
            "row_rounds": [row_rounds(decoded, row) for row in range(len(tokens))] if self.batch_size > 1 else [],
        }

    def _theirs(self, arm: Arm, prompt: int, inputs: dict[str, torch.Tensor]) -> tuple[list[list[int]], dict[str, Any]]:
        """Plain decoding and transformers' own assisted decoding."""
        clock = Clock()
        options = {"stopping_criteria": StoppingCriteriaList([clock])} | self._stock_options(arm)
        sequences = self._generate(arm, self._options(inputs), options)
        (started, before), (ended, after) = clock.steps[0], clock.steps[-1]
        tokens = self._new_tokens(sequences, inputs)
        return tokens, {
            "decode_tokens": after - before if self.batch_size == 1 else _num_after_first(tokens),
            "decode_seconds": ended - started,
            "decode_rounds": len(clock.steps) - 1,
        }

    def _peer(self, arm: Arm, prompt: int, inputs: dict[str, torch.Tensor]) -> tuple[list[list[int]], dict[str, Any]]:
        tokens, num_tokens, cycles, seconds = self._peers[arm.name].decode(
            inputs["input_ids"], self.max_new_tokens, self.seed + prompt
        )
        return [tokens], {"decode_tokens": num_tokens, "decode_rounds": cycles, "decode_seconds": seconds}

    def _new_tokens(self, sequences: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
        new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        if self.batch_size == 1:
            return new
        ends = eos_token_ids(self.target)
        return [until_end(row, ends) for row in new]

    def _pad_token_id(self) -> int:
        given = self.target.generation_config.pad_token_id
        return 0 if given is None else int(given)

    def _options(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            **inputs,
            **({"pad_token_id": self._pad_token_id()} if self.batch_size > 1 else {}),
            "max_new_tokens": self.max_new_tokens,
            **whole_law(self.temperature),
        }

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
        for prompt in range(len(self.batches)):
            for arm in self.arms if prompt % 2 == 0 else reversed(self.arms):
                yield arm, prompt

    def _rewrite(self, rows: list[Row]) -> None:
        if self.checkpoint is not None:
            write_at_once(self.checkpoint, "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())

    def _append(self, row: Row) -> None:
        if self.checkpoint is not None:
            with self.checkpoint.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def _num_after_first(tokens: list[list[int]]) -> int:
    return sum(len(row) - 1 for row in tokens)
