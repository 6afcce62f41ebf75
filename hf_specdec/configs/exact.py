"""The preset of exact decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hf_specdec.acceptance import EarlyExactGuard, Exact
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import rule_of
from hf_specdec.records import AcceptanceRule


__all__ = ["ExactConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class ExactConfig(BaseConfig):
    """Exact speculative decoding (arXiv 2211.17192): the law, or the greedy text, of the target itself.

    Args:
        guard (`int`, [`EarlyExactGuard`], `"auto"`, *optional*): As for [`SpeculativeConfig`]; here every token is judged
            exactly, whatever it says.
    """

    guard: EarlyExactGuard | int | str | None = "auto"

    @property
    def rule(self) -> AcceptanceRule:
        return rule_of(Exact(), self.guard)
