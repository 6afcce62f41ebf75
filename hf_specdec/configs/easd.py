"""The preset of EASD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from hf_specdec.acceptance import EASD, EarlyExactGuard
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import guarded
from hf_specdec.laws import EntropyKind
from hf_specdec.records import AcceptanceRule


__all__ = ["EASDConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class EASDConfig(BaseConfig):
    """EASD, entropy-aware token rejection (arXiv 2512.23765). See [`hf_specdec.acceptance.EASD`] for what is published.

    Drafts with the model alone: an n-gram draft is a point mass, whose entropy is 0, and the rule could never fire on it.
    `drafting="hybrid"` is possible; rounds that an n-gram match serves are then exact.

    Args:
        entropy_threshold (`float`): Threshold of both entropies, in units of `entropy_base`.
        target_entropy_threshold, draft_entropy_threshold (`float`, *optional*): One of them, where they should differ.
        overlap_threshold (`float`): Least overlap of the two top-n sets, in [0, 1]; above 1 the rule never fires.
        top_n (`int`): Size of the two sets.
        resample (`str`): `"masked"` or `"plain"`.
        apply_to (`str`): `"accepted"` or `"all"`.
        penalty (`float`): Share of the rejected token's probability that survives the mask.
        entropy_kind (`str`): `"full"`, `"topk"` or `"normalized"`.
        entropy_top_k (`int`): Terms of the `"topk"` entropy.
        entropy_base (`float`): Base of the logarithm; e measures in nats.
        guard (`int` or [`EarlyExactGuard`], *optional*): Generated tokens that are judged exactly first; none, as published.
    """

    entropy_threshold: float = 2.0
    target_entropy_threshold: float | None = None
    draft_entropy_threshold: float | None = None
    overlap_threshold: float = 0.6
    top_n: int = 5
    resample: Literal["masked", "plain"] = "masked"
    apply_to: Literal["accepted", "all"] = "accepted"
    penalty: float = 0.0
    entropy_kind: EntropyKind = "full"
    entropy_top_k: int = 3
    entropy_base: float = math.e
    guard: EarlyExactGuard | int | None = None

    @property
    def rule(self) -> AcceptanceRule:
        target, draft = self.target_entropy_threshold, self.draft_entropy_threshold
        rule = EASD(
            target_entropy_threshold=self.entropy_threshold if target is None else target,
            draft_entropy_threshold=self.entropy_threshold if draft is None else draft,
            overlap_threshold=self.overlap_threshold,
            top_n=self.top_n,
            resample=self.resample,
            apply_to=self.apply_to,
            penalty=self.penalty,
            entropy_kind=self.entropy_kind,
            entropy_top_k=self.entropy_top_k,
            entropy_base=self.entropy_base,
        )
        return guarded(rule, self.guard)
