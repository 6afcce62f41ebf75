"""The preset of drafter networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from hf_specdec.acceptance import Exact
from hf_specdec.configs.base import BaseConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths import ConstantLength
from hf_specdec.records import AcceptanceRule, LengthController


__all__ = ["RCSDConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class RCSDConfig(BaseConfig):
    """Exact decoding with a drafter network of the EAGLE family, such as RCSD trains on HASS (published: exact, steps 3 to 6).

    Args:
        steps (`int`): Tokens drafted per round, unless `length` says how many.
        tree (`str`, *optional*): Reserved for draft trees, which are not implemented: None drafts a chain.
    """

    drafting: Literal["auto", "model", "ngram", "hybrid"] = "model"
    steps: int = 5
    tree: str | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            raise InvalidConfigError(
                f"draft trees are not implemented yet: pass tree=None, which drafts a chain; got {self.tree!r}"
            )
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidConfigError(f"steps must be an integer of at least 1, got {self.steps!r}")
        super().__post_init__()

    @property
    def rule(self) -> AcceptanceRule:
        return Exact()

    def auto_length(self, deterministic: bool) -> LengthController:
        return ConstantLength(self.steps)
