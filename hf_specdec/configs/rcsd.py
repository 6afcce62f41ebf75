"""The preset of drafter networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from hf_specdec.acceptance import EarlyExactGuard, Exact
from hf_specdec.configs.base import BaseConfig
from hf_specdec.configs.guarding import rule_of
from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths import ConstantLength, GoodputTree, TreeLength
from hf_specdec.records import AcceptanceRule, LengthController
from hf_specdec.trees import TreeShape


__all__ = ["RCSDConfig"]


@final
@dataclass(frozen=True, kw_only=True)
class RCSDConfig(BaseConfig):
    """Decoding with a drafter network of the EAGLE family, such as RCSD trains on HASS (published: exact, steps 3 to 6).

    Args:
        steps (`int`): Tokens drafted per round, unless `length` says how many.
        tree ([`TreeShape`] or `str`, *optional*): Draft dynamic trees (EAGLE-2, arXiv 2406.16858) of this size; `"auto"` takes
            the number of nodes that yields the most tokens per second, as [`GoodputTree`] measures it, and
            `length=GoodputTree(...)` says how. None drafts a chain.
        acceptance (rule or its name): The acceptance rule; exact by default, and always for trees.
        guard (`int`, [`EarlyExactGuard`], `"auto"`, *optional*): As for [`SpeculativeConfig`].
    """

    drafting: Literal["auto", "model", "ngram", "hybrid"] = "model"
    steps: int = 5
    tree: TreeShape | Literal["auto"] | None = None
    acceptance: AcceptanceRule | str = field(default_factory=Exact)
    guard: EarlyExactGuard | int | str | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidConfigError(f"steps must be an integer of at least 1, got {self.steps!r}")
        self._check_tree()
        super().__post_init__()

    def _check_tree(self) -> None:
        if self.tree is None:
            if isinstance(self.length, GoodputTree | TreeLength):
                raise InvalidConfigError(f'{type(self.length).__name__} sizes trees: pass tree="auto" with it')
            return
        if self.tree != "auto" and not isinstance(self.tree, TreeShape):
            raise InvalidConfigError(f'tree must be None, "auto" or a TreeShape, got {self.tree!r}')
        rule = rule_of(self.acceptance, None)
        if not rule.lossless:
            raise InvalidConfigError(
                f"{type(rule).__name__} judges chains only, and tree={self.tree!r} drafts trees: drop acceptance=..., or draft "
                "chains with tree=None"
            )
        if self.drafting != "model":
            raise InvalidConfigError(
                f'a drafter network drafts the tree alone: drop drafting="{self.drafting}", or draft chains with tree=None'
            )
        sized_by = self.tree == "auto" and isinstance(self.length, GoodputTree)
        if self.length != "auto" and not sized_by:
            raise InvalidConfigError(
                f"length={self.length!r} and tree={self.tree!r} both say how far to draft: pass one of them, or "
                'length=GoodputTree(...) with tree="auto"'
            )

    @property
    def rule(self) -> AcceptanceRule:
        return rule_of(self.acceptance, self.guard)

    @property
    def tree_shape(self) -> TreeShape | None:
        if isinstance(self.length, GoodputTree):
            return self.length.shape
        return TreeShape() if self.tree == "auto" else self.tree

    def auto_length(self, deterministic: bool) -> LengthController:
        if self.tree == "auto":
            return GoodputTree()
        return ConstantLength(self.steps) if self.tree is None else TreeLength(self.tree)
