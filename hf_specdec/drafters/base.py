"""What all drafters share: the settings of a run, and the shape that transformers' assisted decoding expects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specdec.errors import DrafterError
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.verify import RandomStreams


__all__ = ["DraftSettings", "DrafterBase"]


@dataclass(frozen=True)
class DraftSettings:
    """What a drafter must know about the run it drafts for.

    Args:
        vocab_size (`int`): Width of the target's logits; ids beyond it are never drafted.
        do_sample (`bool`): Whether drafts are drawn from the draft law or are its argmax.
        warpers (`LogitsProcessorList`): Stateless processors of the run, applied to draft logits before choosing.
        streams (`RandomStreams`, *optional*): The run's dice; needed when sampling.
        keep_logits (`bool`): Whether drafts must carry the drafter's raw logits (a rule reads them).
        pad_token_id (`int`): Filler id.
        eos_token_ids (`tuple[int, ...]`): A row stops drafting after one of these.
        max_tokens (`int`): Draft length when the drafter is used inside transformers' own assisted decoding.
        min_confidence (`float`): Confidence bound there; see [`Budget`].
        max_length (`int`, *optional*): Longest sequence there; drafts leave room for the target's own token.
    """

    vocab_size: int
    do_sample: bool = False
    warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    streams: RandomStreams | None = None
    keep_logits: bool = False
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int = 5
    min_confidence: float = 0.0
    max_length: int | None = None


class DrafterBase(CandidateGenerator, ABC):
    """A drafter for one `generate` call.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> Draft:
        """Drafts at most `budget.max_tokens[b]` tokens after row `b` of the context."""

    @property
    def device(self) -> torch.device:
        """Where it computes: the CPU, unless it has a model."""
        return torch.device("cpu")

    @property
    def can_drop_rows(self) -> bool:
        """Whether [`~DrafterBase.keep_rows`] works."""
        return False

    def keep_rows(self, kept: Tensor) -> None:
        """From now on the batch has only the rows at the places `kept` (`(kept,)`)."""
        raise DrafterError(f"{type(self).__name__} cannot drop rows")

    def get_candidates(self, input_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Transformers' side of a drafter: candidates for `input_ids` (`(1, length)`) and the logits they came from.

        Returns:
            `(1, length + drafted)` candidate ids and, for sampled drafts, `(1, drafted, vocab)` log-probabilities of the
            law they were really drawn from. None stands for point masses.
        """
        settings = self.settings
        room = settings.max_tokens
        if settings.max_length is not None:
            room = max(0, min(room, settings.max_length - input_ids.shape[1] - 1))
        draft = self.propose(Context.of(input_ids), Budget(torch.tensor([room]), settings.min_confidence))
        draft = draft.read()
        count = int(draft.lengths[0])
        candidates = torch.cat([input_ids, draft.tokens[:, :count].to(input_ids.device)], dim=-1)
        return candidates, None if draft.q is None or count == 0 else draft.q[:, :count].log()

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to update: a drafter finds out from the next prefix what was accepted."""
