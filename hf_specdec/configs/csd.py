"""The preset of CSD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

from hf_specdec.acceptance import CSD, CorrectionMemory, EarlyExactGuard
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import DEFAULT_GUARD, guarded
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import AcceptanceRule


__all__ = ["CSDConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class CSDConfig(BaseConfig):
    """CSD, calibrated speculative decoding (arXiv 2604.13634). See [`hf_specdec.acceptance.CSD`] for what is published.

    Args:
        frequency_threshold (`float`): A mismatch is familiar once it was met more often than this.
        score_ratio (`float`): Least ratio of the untempered probabilities of draft and target token.
        mode (`str`): `"both"`, `"ocm"` (memory only) or `"scg"` (gate only).
        memory ([`CorrectionMemory`], `str` or `Path`, *optional*): What was learnt before. An object grows from call to call,
            and an empty one without a fingerprint takes that of the first pair; a saved one is read once and each call starts
            from a copy of it; without one each call starts from nothing. One with the fingerprint of another pair of models is
            refused.
        online_update (`bool`): Whether the memory grows while decoding.
        protected_tokens (`tuple[int, ...]`): Tokens that are never rescued nor replaced, beside ends of text.
        guard (`int` or [`EarlyExactGuard`], *optional*): Generated tokens that are judged exactly first (arXiv 2610.08678), or
            a guard with a schedule; None for no guard.
    """

    frequency_threshold: float = 6
    score_ratio: float = 0.01
    mode: Literal["both", "ocm", "scg"] = "both"
    memory: CorrectionMemory | str | Path | None = None
    online_update: bool = True
    protected_tokens: tuple[int, ...] = ()
    guard: EarlyExactGuard | int | None = DEFAULT_GUARD

    def __post_init__(self) -> None:
        object.__setattr__(self, "protected_tokens", tuple(self.protected_tokens))  # a saved config holds a list
        super().__post_init__()

    @property
    def rule(self) -> AcceptanceRule:
        rule = CSD(
            frequency_threshold=self.frequency_threshold,
            score_ratio=self.score_ratio,
            mode=self.mode,
            learn=self.online_update,
            protected_tokens=self.protected_tokens,
            memory=self._memory(),
        )
        return guarded(rule, self.guard)

    @property
    def fingerprint(self) -> str:
        return self._memory().fingerprint

    def check_models(self, target: Any, draft: Any) -> None:
        """Refuses a memory of another pair, and names the pair in an empty one that this call begins to fill."""
        super().check_models(target, draft)
        if isinstance(self.memory, CorrectionMemory) and self.online_update:
            self.memory.claim(target.config, draft.config)

    def _memory(self) -> CorrectionMemory:
        if isinstance(self.memory, CorrectionMemory):
            return self.memory
        return CorrectionMemory() if self.memory is None else self._saved.copy()

    @cached_property
    def _saved(self) -> CorrectionMemory:
        if not isinstance(self.memory, str | Path):
            raise InvalidConfigError(
                f"memory must be a CorrectionMemory or the path of a saved one, got {type(self.memory).__name__}"
            )
        return CorrectionMemory.load(self.memory)
