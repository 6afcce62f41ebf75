"""What a token is worth to each row of a batch that ends when its last row does."""

from __future__ import annotations

import torch
from torch import Tensor


__all__ = ["row_weights"]

_SHARED = 0.7  # of a round's time, taken to be the same however few rows are left
_LAG = 16.0  # tokens by which a row must be behind for e times the chance to be the last to end


def row_weights(num_tokens: Tensor, unfinished: Tensor) -> Tensor:
    """Weights with a mean of 1 over the unfinished rows, larger for those that are behind (ours).

    Rows share each round, so a batch takes `shared * (rounds of its slowest row) + own * (rounds of all rows)` seconds. A token
    of row `b` therefore saves `1 - phi + phi * rows * pi_b` of what it saves a batch of equal rows, where `phi` is the share
    of a round's time that does not depend on the number of rows, and `pi_b` the chance that row `b` ends last, taken to be
    proportional to `exp(-tokens so far / 16)`.

    Args:
        num_tokens (`torch.LongTensor` of shape `(batch,)`): New tokens of each row so far.
        unfinished (`torch.BoolTensor` of shape `(batch,)`): Rows that go on; the others weigh nothing.
    """
    last = torch.where(unfinished, -num_tokens / _LAG, -torch.inf).softmax(-1)
    return torch.where(unfinished, 1.0 - _SHARED + _SHARED * int(unfinished.sum()) * last, 0.0)
