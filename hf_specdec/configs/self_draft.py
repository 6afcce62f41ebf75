"""The preset of self-drafting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from hf_specdec.acceptance import EarlyExactGuard, Exact
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import rule_of
from hf_specdec.drafters.exit_policy import ExitPolicy
from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths import ConstantLength, GoodputLength
from hf_specdec.records import AcceptanceRule, LengthController


__all__ = ["SelfDraftConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class SelfDraftConfig(ExitPolicy, BaseConfig):
    """Adaptive self-drafting (SpecBound, arXiv 2604.12247): the model drafts with its own lower layers, exactly. See
    [`hf_specdec.drafters.ExitPolicy`] for the options of the exit and what is published.

    `length="auto"` measures what pays and decodes plainly where nothing does; when sampling it is `max_width`.
    `drafting="hybrid"` looks the text up where no exit is confident.

    Args:
        exit_heads (`str` or `Path`, *optional*): Path or Hub id of saved exit heads; raw ones by default. Heads in memory are
            passed as `assistant_model=`.
        acceptance (rule or its name): The acceptance rule; exact by default.
        guard (`int`, [`EarlyExactGuard`], `"auto"`, *optional*): As for [`SpeculativeConfig`].
    """

    exit_heads: str | Path | None = None
    acceptance: AcceptanceRule | str = field(default_factory=Exact)
    guard: EarlyExactGuard | int | str | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.exit_heads, Path):  # so that it can be saved
            object.__setattr__(self, "exit_heads", str(self.exit_heads))
        if not isinstance(self.exit_heads, str | None):
            raise InvalidConfigError(
                f"exit_heads must be the path or Hub id of saved heads, got {type(self.exit_heads).__name__}: pass heads in "
                "memory as assistant_model=..."
            )
        ExitPolicy.__post_init__(self)
        BaseConfig.__post_init__(self)
        if self.drafting == "ngram":
            raise InvalidConfigError(
                'SelfDraftConfig drafts with the model itself, or with prompt lookup behind it (drafting="hybrid"). For '
                'prompt lookup alone use SpeculativeConfig(drafting="ngram")'
            )

    @property
    def rule(self) -> AcceptanceRule:
        return rule_of(self.acceptance, self.guard)

    def auto_length(self, deterministic: bool) -> LengthController:
        return GoodputLength(longest=self.max_width) if deterministic else ConstantLength(self.max_width)
