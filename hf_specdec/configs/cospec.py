"""The preset of CoSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hf_specdec.acceptance import ArbitrationPolicy, CoSpec
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import DEFAULT_GUARD, guarded
from hf_specdec.records import AcceptanceRule


__all__ = ["CoSpecConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class CoSpecConfig(BaseConfig):
    """CoSpec, collaborative speculative decoding (arXiv 2605.24793). See [`hf_specdec.acceptance.CoSpec`].

    Args:
        policy ([`hf_specdec.acceptance.ArbitrationPolicy`], *optional*): What arbitrates; none decodes exactly, and says so.
        threshold (`float`): The draft is taken where the policy is surer than this.
        floor_ratio (`float`): Least ratio of the untempered target probabilities of draft and argmax.
        guard (`int`, *optional*): Generated tokens that are judged exactly first (arXiv 2610.08678); None for no guard.
    """

    policy: ArbitrationPolicy | None = None
    threshold: float = 0.5
    floor_ratio: float = 1e-3
    guard: int | None = DEFAULT_GUARD

    @property
    def rule(self) -> AcceptanceRule:
        return guarded(CoSpec(self.policy, self.threshold, self.floor_ratio), self.guard)
