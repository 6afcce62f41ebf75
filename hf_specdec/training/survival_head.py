"""The head that VAT trains beside a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


__all__ = ["SurvivalHead"]


class SurvivalHead(nn.Module):
    """Predicts from a draft's state whether the chain up to that draft survives verification (VAT, arXiv 2608.30135, names a
    head with a binary cross entropy; that it is one linear layer which starts at 0, so that a run draws no random numbers for
    it, is ours).

    Its gradient reaches the drafter. It serves training only and is not exported with the drafter.

    Args:
        hidden_size (`int`): Width of the drafter's states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.utils.skip_init(nn.Linear, hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Logits of survival, K tensors `(batch, tokens)`, from K tensors `(batch, tokens, hidden_size)`."""
        return [self.linear(each)[..., 0] for each in states]
