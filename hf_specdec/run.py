"""What one run of the loop works with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import AcceptanceRule, Drafter, DropsRows, LengthController
from hf_specdec.sequences import Sequences
from hf_specdec.verify import RandomStreams


__all__ = ["Record", "Run"]

logger = logging.getLogger(__name__)


@dataclass
class Record:
    """Per-token outputs, kept only where they were asked for: one entry per new token, as in plain decoding."""

    keeps_scores: bool = False
    keeps_logits: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def add(self, scores: Tensor, logits: Tensor) -> None:
        if self.keeps_scores:
            self.scores.append(scores.clone())
        if self.keeps_logits:
            self.logits.append(logits.clone())

    @property
    def given_scores(self) -> tuple[Tensor, ...] | None:
        """What stopping criteria are given."""
        return tuple(self.scores) if self.keeps_scores else None


@dataclass
class Run:
    """Everything one call of `speculate` works with.

    Args:
        target ([`PrefixLM`]): The target; its cache already holds the prompts.
        sequences ([`Sequences`]): The prompts, and later the texts.
        drafter ([`Drafter`], *optional*): What proposes; None decodes plainly.
        rule ([`AcceptanceRule`]): What judges.
        controller ([`LengthController`]): What says how far.
        processors (`LogitsProcessorList`): The target's processors.
        do_sample (`bool`): Whether the target samples.
        max_length (`int`): Longest sequence, in columns.
        vocab_size (`int`): Width of the target's logits.
        streams ([`RandomStreams`], *optional*): The dice; None for deterministic runs.
        lockstep (`bool`): All rows advance by the same number of tokens, and processors and criteria see the whole batch
            once per step, exactly as in plain decoding. Otherwise rows advance on their own.
        prompt_mask (`torch.LongTensor`, *optional*): 0 where a prompt is padding.
        on_drafter_error (`str`): `"continue"` decodes on plainly after a drafter failed, `"raise"` raises.
        record ([`Record`]): Per-token outputs.
        observe_outputs (`Callable`, *optional*): Called with the target's outputs, the number of steps committed from
            them and the number of columns cached before them, for hidden states and attentions.
        drops_rows (`bool`): Rows that have finished leave the batch. Only where rows advance on their own, nobody wants the
            cache, and the drafter can do it.
        give_up (`Callable`, *optional*): Called when a drafter has failed, to keep nothing more for it.
        goes_on (`Callable`, *optional*): Told whether this process has unfinished rows, says whether any process has; then
            all run forward passes until every one has finished.
    """

    target: PrefixLM
    sequences: Sequences
    drafter: Drafter | None
    rule: AcceptanceRule
    controller: LengthController
    processors: LogitsProcessorList
    do_sample: bool
    max_length: int
    vocab_size: int
    streams: RandomStreams | None = None
    lockstep: bool = True
    prompt_mask: Tensor | None = None
    on_drafter_error: Literal["continue", "raise"] = "continue"
    record: Record = field(default_factory=Record)
    observe_outputs: Any = None
    drops_rows: bool = False
    give_up: Callable[[], None] | None = None
    goes_on: Callable[[bool], bool] | None = None

    def keep_rows(self, kept: Tensor) -> str | None:
        """Goes on with the rows at the places `kept` (`(kept,)`) only; returns what went wrong with the drafter."""
        self.sequences.keep_rows(kept)
        self.target.keep_rows(kept)
        if self.streams is not None:
            self.streams.keep_rows(kept)
        if self.prompt_mask is not None:
            self.prompt_mask = self.prompt_mask[kept]
        try:
            if isinstance(self.drafter, DropsRows):
                self.drafter.keep_rows(kept)
        except Exception as error:
            return self.lose_drafter(error)
        return None

    def lose_drafter(self, error: Exception) -> str:
        """Goes on without a drafter that failed, or raises where that is asked for; returns what went wrong."""
        if self.on_drafter_error == "raise":
            raise error
        problem = f"the drafter {type(self.drafter).__name__} failed: {type(error).__name__}: {error}"
        logger.warning("%s. Decoding goes on without drafts.", problem)
        self.drafter = None
        if self.give_up is not None:
            self.give_up()
        return problem
