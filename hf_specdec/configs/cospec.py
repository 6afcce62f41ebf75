"""The preset of CoSpec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from hf_specdec.acceptance import ArbitrationPolicy, CoSpec, EarlyExactGuard, PolicyNetwork
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import DEFAULT_GUARD, guarded
from hf_specdec.records import AcceptanceRule


__all__ = ["CoSpecConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class CoSpecConfig(BaseConfig):
    """CoSpec, collaborative speculative decoding (arXiv 2605.24793). See [`hf_specdec.acceptance.CoSpec`].

    Args:
        policy ([`hf_specdec.acceptance.ArbitrationPolicy`], `str` or `Path`, *optional*): What arbitrates, or where a
            [`hf_specdec.acceptance.PolicyNetwork`] was saved; none decodes exactly, and says so.
        threshold (`float`): The draft is taken where the policy is surer than this.
        floor_ratio (`float`): Least ratio of the untempered target probabilities of draft and argmax.
        guard (`int` or [`EarlyExactGuard`], *optional*): Generated tokens that are judged exactly first (arXiv 2610.08678), or
            a guard with a schedule; None for no guard.
    """

    policy: ArbitrationPolicy | str | Path | None = None
    threshold: float = 0.5
    floor_ratio: float = 1e-3
    guard: EarlyExactGuard | int | None = DEFAULT_GUARD

    @property
    def rule(self) -> AcceptanceRule:
        return guarded(CoSpec(self._policy, self.threshold, self.floor_ratio), self.guard)

    @property
    def fingerprint(self) -> str:
        return self._policy.fingerprint if isinstance(self._policy, PolicyNetwork) else ""

    @cached_property
    def _policy(self) -> ArbitrationPolicy | None:
        return PolicyNetwork.load(self.policy) if isinstance(self.policy, str | Path) else self.policy
