"""What a rule around another rule takes from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from hf_specdec.records import AcceptanceRule, Judged, Observer


__all__ = ["WrappingRule"]


class WrappingRule(ABC):
    """A rule around the rule `inner`, with the inner rule's properties."""

    inner: AcceptanceRule

    @property
    def lossless(self) -> bool:
        """That of the inner rule."""
        return self.inner.lossless

    @property
    def needs_draft_logits(self) -> bool:
        """That of the inner rule."""
        return self.inner.needs_draft_logits

    @property
    def throws_dice(self) -> bool:
        """That of the inner rule."""
        return self.inner.throws_dice

    @abstractmethod
    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Sees a committed round, and shows the inner rule what concerns it."""

    def observed_by_inner(self, judged: Judged) -> Mapping[str, Tensor]:
        """Shows a committed round to the inner rule, if it wants to see it."""
        return self.inner.observe(judged) if isinstance(self.inner, Observer) else {}
