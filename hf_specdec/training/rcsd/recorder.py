"""Records the rounds of ordinary decoding, for later training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from hf_specdec.acceptance import Exact, emitted_law
from hf_specdec.acceptance.wrapping import WrappingRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule, Evidence, Judged, Outcome, Round
from hf_specdec.training.rcsd.recording import DraftedRound, Recording, TopLaws
from hf_specdec.training.rcsd.shards import ShardWriter
from hf_specdec.training.texts import Text


__all__ = ["RoundRecorder"]


@final
class RoundRecorder(WrappingRule):
    """An acceptance rule that changes nothing of the one it wraps, and writes down what verification showed.

    The target's pass over the drafts is looked at, and no pass is added. Texts are decoded as without it: it is given to
    `generate` as the rule *and* as the callback of rounds,

    `generate(..., speculative_config=SpeculativeConfig(acceptance=recorder, drafting="model"), round_callback=recorder)`

    and `close()` after the last call writes what is left. One recorder serves one `generate` call at a time. Without a folder,
    the recordings stay in `recordings`.

    Args:
        folder (`str` or `Path`, *optional*): Where shards are written; what earlier recorders wrote there is kept and counted.
        rule ([`AcceptanceRule`], *optional*): The rule that judges; [`Exact`] unless given.
        top (`int`): Likeliest tokens of the target's law that are written down at each draft; 0 for none.
        texts_per_shard (`int`): Texts in a shard.
        max_shards (`int`): Most shards in the folder; the oldest are deleted.
        pad_token_id (`int`, *optional*): What prompts were padded with on the left, which is cut off.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        rule: AcceptanceRule | None = None,
        top: int = 0,
        texts_per_shard: int = 64,
        max_shards: int = 64,
        pad_token_id: int | None = None,
    ) -> None:
        if top < 0 or texts_per_shard < 1 or max_shards < 1:
            raise InvalidConfigError(
                "top must be at least 0, texts_per_shard and max_shards at least 1, got "
                f"{top}, {texts_per_shard} and {max_shards}"
            )
        self.inner, self.top, self.pad_token_id = rule or Exact(), top, pad_token_id
        self.recordings: list[Recording] = []
        self._writer = None if folder is None else ShardWriter(Path(folder), texts_per_shard, max_shards)
        self._seen: Evidence | None = None
        self._rows: list[_Row] = []

    def acceptance(self, evidence: Evidence) -> Tensor:
        return self.inner.acceptance(evidence)

    def replacement(self, evidence: Evidence) -> Tensor:
        return self.inner.replacement(evidence)

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that the inner rule emits; NaN where it is not known."""
        return emitted_law(self.inner, evidence)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        return self.inner.count(evidence, outcome)

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Keeps the round's evidence until the callback says what was committed."""
        self._seen = judged.evidence.whole or judged.evidence
        return self.observed_by_inner(judged)

    def __call__(self, round_: Round) -> None:
        """The callback of rounds."""
        evidence, self._seen = self._seen, None
        if round_.is_prefill:
            self._finish_texts()
            self._rows = [_Row() for _ in round_.emitted]
        if evidence is not None and evidence.place is not None:
            for row, kept in enumerate(self._rows):
                if not kept.has_prompt:
                    kept.start(evidence.place.text[row, : evidence.place.prompt_columns].tolist(), self.pad_token_id)
                if round_.emitted[row] and int(round_.num_drafted[row]):
                    kept.rounds.append(self._round(evidence, row, kept, round_))
        for kept, emitted in zip(self._rows, round_.emitted, strict=True):
            kept.answer.extend(emitted)
        if not bool(round_.unfinished.any()):
            self._finish_texts()

    def close(self) -> None:
        """Writes what is left."""
        self._finish_texts()
        if self._writer is not None:
            self._writer.flush()

    def _round(self, evidence: Evidence, row: int, kept: _Row, round_: Round) -> DraftedRound:
        count = int(round_.num_drafted[row])
        return DraftedRound(
            anchor=len(kept.prompt) + len(kept.answer) - 2,
            drafts=tuple(evidence.tokens[row, :count].tolist()),
            choices=tuple(evidence.scores[row, :count].argmax(-1).tolist()),
            num_accepted=int(round_.num_accepted[row]),
            laws=_top_laws(evidence.target_logits[row, :count], self.top) if self.top else None,
        )

    def _finish_texts(self) -> None:
        rows, self._rows = self._rows, []
        for row in rows:
            if row.rounds:
                recording = Recording(Text((*row.prompt, *row.answer), len(row.prompt)), tuple(row.rounds))
                if self._writer is None:
                    self.recordings.append(recording)
                else:
                    self._writer.add(recording)


class _Row:
    """A text that is being written."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.rounds: list[DraftedRound] = []
        self.has_prompt = False

    def start(self, prompt: list[int], pad_token_id: int | None) -> None:
        first = next((index for index, token in enumerate(prompt) if token != pad_token_id), len(prompt))
        self.prompt, self.has_prompt = prompt[first:], True


def _top_laws(logits: Tensor, top: int) -> TopLaws:
    log_p = logits.float().log_softmax(-1)
    values, tokens = log_p.topk(min(top, log_p.shape[-1]), -1)
    tail = (1.0 - values.exp().sum(-1)).clamp(min=0.0)
    return TopLaws(tokens.to(torch.int32).cpu(), values.half().cpu(), tail.half().cpu())
