"""The general form of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from hf_specdec.acceptance import EarlyExactGuard, Exact
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import rule_of
from hf_specdec.records import AcceptanceRule


__all__ = ["SpeculativeConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(BaseConfig):
    """The general form; exact acceptance unless another rule is given.

    Args:
        acceptance (rule or its name in [`hf_specdec.acceptance.ACCEPTANCE`]): The acceptance rule.
        guard (`int`, [`EarlyExactGuard`], `"auto"`, *optional*): Generated tokens that are judged exactly before a relaxed rule
            takes over (arXiv 2610.08678), or a guard with a schedule. `"auto"`: 2 for the relaxed rules of this package but
            EASD, none for EASD and rules of your own; None for no guard.
    """

    acceptance: AcceptanceRule | str = field(default_factory=Exact)
    guard: EarlyExactGuard | int | str | None = "auto"

    @property
    def rule(self) -> AcceptanceRule:
        return rule_of(self.acceptance, self.guard)
