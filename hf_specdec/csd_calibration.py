"""Filling CSD's correction memory by decoding prompts, without changing any text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.acceptance import CorrectionMemory, pair_fingerprint
from hf_specdec.compatibility import check_tokenizers
from hf_specdec.configs import CSDConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation import generate
from hf_specdec.placement import device_of
from hf_specdec.sequences import pad_left, padding_of
from hf_specdec.stats import SpeculativeStats


__all__ = ["CSDCalibration", "calibrate_csd"]


@dataclass(frozen=True)
class CSDCalibration:
    """What [`calibrate_csd`] met.

    Args:
        num_prompts, num_tokens, num_rounds (`int`): What was decoded.
        num_mismatches (`int`): Reached drafts that were not the target's argmax.
        num_pairs (`int`): Different pairs in the memory, those of earlier calibrations included.
        num_familiar (`int`): Pairs that CSD's default threshold of 6 calls familiar.
        familiar_share (`float`): Share of all counts in the memory that fall on them.
        memory ([`CorrectionMemory`]): The counts, with the fingerprint of the two models.
    """

    num_prompts: int
    num_tokens: int
    num_rounds: int
    num_mismatches: int
    num_pairs: int
    num_familiar: int
    familiar_share: float
    memory: CorrectionMemory

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python values, ready for JSON."""
        values = {name: value for name, value in vars(self).items() if name != "memory"}
        return values | {"fingerprint": self.memory.fingerprint, "max_entries": self.memory.max_entries}

    def summary(self) -> str:
        """A line to print."""
        return (
            f"{self.num_prompts} prompts, {self.num_tokens} tokens, {self.num_mismatches} mismatches: the memory holds "
            f"{self.num_pairs} pairs, of which {self.num_familiar} are familiar and make up {self.familiar_share:.1%} of all "
            "mismatches in it"
        )


def calibrate_csd(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    memory: CorrectionMemory | None = None,
    max_entries: int = 200_000,
    max_new_tokens: int = 256,
    length: int = 6,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> CSDCalibration:
    """Decodes the prompts greedily and counts every mismatch that verification reaches; no draft is rescued meanwhile.

    Published (arXiv 2604.13634, as summarised): calibration on unlabelled samples without a change of weights, drafts of 6.
    Ours: that the target's own answers are decoded, so that the mismatches are those of decoding itself.

    Args:
        target, draft (`PreTrainedModel`): The two models.
        prompts (sequence of token ids): What to answer.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        memory ([`CorrectionMemory`], *optional*): Counts to go on from; the object itself stays as it is.
        max_entries (`int`): Bound of a new memory.
        max_new_tokens (`int`): Longest answer.
        length (`int`): Tokens to draft per round.
        batch_size (`int`): Prompts that are answered together. It changes the counts only where a full memory drops pairs, or
            rounding changes a text.
        progress (`Callable`, *optional*): Called with the number of prompts answered and of all prompts.

    Raises:
        [`InvalidConfigError`]: If there is no prompt, or the memory is about another pair of models.
        [`IncompatibleDraftError`]: If the models use different tokenizers.
    """
    if not prompts:
        raise InvalidConfigError("there is no prompt to calibrate on")
    check_tokenizers(target, draft, tokenizer, None)
    kept = _memory_for(pair_fingerprint(target.config, draft.config), memory, max_entries)
    config = CSDConfig(
        memory=kept, frequency_threshold=math.inf, length=length, drafting="model", guard=None, on_drafter_error="raise"
    )
    found: list[SpeculativeStats] = []
    for start in range(0, len(prompts), batch_size):
        together = prompts[start : start + batch_size]
        _answer(target, draft, together, config, max_new_tokens, found.append)
        if progress is not None:
            progress(start + len(together), len(prompts))
    counts = [count for _, count in kept.items()]
    familiar = [count for count in counts if count > CSDConfig().frequency_threshold]
    return CSDCalibration(
        num_prompts=len(prompts),
        num_tokens=sum(each.num_new_tokens for each in found),
        num_rounds=sum(each.num_rounds for each in found),
        num_mismatches=sum(each.num_verified_tokens - each.num_accepted_tokens for each in found),
        num_pairs=len(kept),
        num_familiar=len(familiar),
        familiar_share=sum(familiar) / sum(counts) if counts else 0.0,
        memory=kept,
    )


def _memory_for(fingerprint: str, memory: CorrectionMemory | None, max_entries: int) -> CorrectionMemory:
    """A memory for a pair of models: a new one, or a copy of one of the same pair."""
    new = CorrectionMemory(max_entries, fingerprint)
    if memory is None:
        return new
    kept = memory.copy()
    kept.merge(new)  # which refuses another pair of models, and tells an empty memory which pair it is
    return kept


@torch.no_grad()
def _answer(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    config: CSDConfig,
    max_new_tokens: int,
    keep: Callable[[SpeculativeStats], None],
) -> None:
    target.generate(
        **pad_left(prompts, padding_of(target), device_of(target)),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        custom_generate=generate,
        drafter=draft,
        speculative_config=config,
        stats_callback=keep,
    )
