"""The preset of NSD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hf_specdec.acceptance import EarlyExactGuard, Nucleus
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import DEFAULT_GUARD, guarded
from hf_specdec.records import AcceptanceRule


__all__ = ["NucleusConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class NucleusConfig(BaseConfig):
    """NSD, nucleus speculative decoding (arXiv 2610.07822). See [`hf_specdec.acceptance.Nucleus`] for what is published.

    Args:
        nucleus_p (`float`): Mass of the nucleus, in [0, 1]; 0 decodes exactly.
        score_temperature (`float`): Temperature of the law whose nucleus it is.
        guard (`int` or [`EarlyExactGuard`], *optional*): Generated tokens that are judged exactly first (arXiv 2610.08678), or
            a guard with a schedule; None for no guard.
    """

    nucleus_p: float = 0.9
    score_temperature: float = 1.0
    guard: EarlyExactGuard | int | None = DEFAULT_GUARD

    @property
    def rule(self) -> AcceptanceRule:
        return guarded(Nucleus(self.nucleus_p, self.score_temperature), self.guard)
