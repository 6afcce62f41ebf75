"""Static ensemble verification (DIVERSE, arXiv 2604.07622), as transformers' `assistant_ensemble_weight`."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from hf_specdec.acceptance.gates import by_model
from hf_specdec.acceptance.relaxed import LawRule, check_range
from hf_specdec.laws import one_hot
from hf_specdec.records import Evidence


__all__ = ["Ensemble"]


@final
@dataclass(frozen=True)
class Ensemble(LawRule):
    """Emits `v = w p + (1 - w) q`; under greedy decoding the argmax of the mixture.

    Published (arXiv 2604.07622, code of transformers 5.24): acceptance `1 - w + w p / q`, which is `v / q`, corrections from
    `(p - q)+`, the bonus from `p`, and the argmax of `v` when decoding greedily. At total variation `(1 - w) TV(p, q)`. Ours:
    tokens that a processor banned from the target are never emitted; penalties shape the target's scores only (in transformers
    the draft model's too). Rows that an n-gram match serves are judged exactly.

    Args:
        weight (`float`): `w`, in (0, 1]; 1 is the exact rule.
    """

    needs_draft_logits: ClassVar[bool] = True

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_range("weight", self.weight, 0.0, 1.0, above=True)

    def law(self, evidence: Evidence, p: Tensor, q: Tensor) -> Tensor:
        if evidence.draft_logits is None or self.weight == 1.0:
            return p
        if evidence.do_sample:
            mixed = self.weight * p + (1.0 - self.weight) * q
        else:
            banned = ~evidence.scores.isfinite()
            draft = evidence.draft_logits.to(p.dtype).masked_fill(banned, float("-inf"))
            # Where nothing of the draft's law is left, its softmax is NaN and the target decides alone.
            mixture = self.weight * evidence.scores.softmax(-1) + (1.0 - self.weight) * draft.softmax(-1).nan_to_num(
                0.0
            )
            mixed = one_hot(mixture.argmax(-1), p.shape[-1], p.dtype)
        return torch.where(by_model(evidence)[..., None], mixed, p)
