"""A limit on how far a rule may leave the target's law, in total variation, and diagnostics of how far it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from hf_specdec.acceptance.emission import emitted_law, step_tv
from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.acceptance.relaxed import check_range
from hf_specdec.acceptance.wrapping import WrappingRule
from hf_specdec.errors import InvalidConfigError
from hf_specdec.readback import sent
from hf_specdec.records import AcceptanceRule, Evidence, Judged, Outcome


__all__ = ["TVBudget"]


class _Ledger:
    """What each row has spent, in double precision, inf once it asked for more than was left; committed rounds only. And the
    costs of the round that is being judged, which are asked for at each step of it."""

    def __init__(self) -> None:
        self.spent: Tensor | None = None
        self._whole: ReferenceType[Evidence] | None = None
        self._cost = torch.zeros(0)
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(self, first: int, steps: tuple[Tensor, Tensor, Tensor]) -> None:
        """Takes what was decided about the positions from `first` on, where a draft is judged position by position: what a
        later one is shown of those before it may differ, since processors have then seen them."""
        if first == 0:
            self._steps = []
        self._steps += zip(*(each.unbind(-1) for each in steps), strict=True)

    def kept(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """What was decided about the first positions, each `(batch, number)`."""
        cheap, cost, within = (torch.stack(each, -1) for each in zip(*self._steps[:number], strict=True))
        return cheap, cost, within

    def cost(self, rule: AcceptanceRule, whole: Evidence) -> Tensor:
        """`step_tv` in double precision, measured once for each evidence: no rule learns within a round."""
        if self._whole is None or self._whole() is not whole:
            self._whole, self._cost = ref(whole), step_tv(rule, whole).double()
        return self._cost

    def of(self, evidence: Evidence) -> Tensor:
        if self.spent is None:
            self.spent = torch.zeros(evidence.tokens.shape[0], dtype=torch.float64, device=evidence.scores.device)
        return self.spent


@final
@dataclass(frozen=True)
class TVBudget(WrappingRule):
    """Any rule, but exact where a step would leave the target's law too far, or once a row has spent its budget.

    Ours. A step costs the total variation between the law that the rule emits there and the target's, see [`step_tv`]. The
    law of a whole text is at most the sum of the costs away from the target's if the sum is bounded on every history, so
    `tv_budget` bounds it. A step whose cost is not known is judged exactly under either limit. One object serves one run:
    configs make a new one for each call of `generate`.

    Args:
        inner ([`AcceptanceRule`]): The rule.
        max_step_tv (`float`): Largest cost of a step; dearer ones are judged exactly.
        tv_budget (`float`): Largest sum of the costs of a row; the step that would exceed it is judged exactly, and so are
            all after it. inf for both only measures.
    """

    inner: AcceptanceRule
    max_step_tv: float = float("inf")
    tv_budget: float = float("inf")
    _ledger: _Ledger = field(default_factory=_Ledger, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range("max_step_tv", self.max_step_tv, 0.0, float("inf"))
        check_range("tv_budget", self.tv_budget, 0.0, float("inf"))
        if isinstance(self.inner, TVBudget):
            raise InvalidConfigError("the rule has a budget already: set the limits of that one")

    def acceptance(self, evidence: Evidence) -> Tensor:
        allowed = self._allowed(evidence)
        if evidence.whole is not None and evidence.index is None:
            cheap, cost, within = (_shown(each, evidence) for each in self._whole(evidence))
            self._ledger.keep(evidence.first, (cheap, cost, within))
        return torch.where(allowed, self.inner.acceptance(evidence), exact_acceptance(evidence))

    def replacement(self, evidence: Evidence) -> Tensor:
        allowed = self._allowed(evidence)
        return torch.where(allowed, self.inner.replacement(evidence), exact_replacement(evidence))

    def emitted(self, evidence: Evidence) -> Tensor:
        """`(batch, width, vocab)`, the law that is emitted: the inner rule's where it may decide, else the target's."""
        allowed = self._allowed(evidence)
        return torch.where(allowed[..., None], emitted_law(self.inner, evidence), evidence.p)

    def count(self, evidence: Evidence, outcome: Outcome) -> Mapping[str, Tensor]:
        """The inner rule's counts, where the inner rule decided."""
        allowed = self._allowed(evidence)[:, 0]
        return {name: values.where(allowed, 0) for name, values in self.inner.count(evidence, outcome).items()}

    def observe(self, judged: Judged) -> Mapping[str, Tensor]:
        """Charges the round. Counts what the inner rule does, about drafts which it decided, and: `rescued`, see `explain`;
        `rejected` drafts; `changed`, positions where the exact rule with the same dice would have decided otherwise and
        another token was emitted; `tv_limited`, positions that a limit made exact."""
        (allowed, cost), spent = self._decided(judged.evidence), self._ledger.of(judged.evidence)
        reached, accepted = (sent(each, allowed.device) for each in (judged.reached, judged.accepted))
        rescued, overruled = _decisions(judged)
        counts = {
            "rescued": rescued.sum(-1),
            "rejected": (reached & ~accepted).sum(-1),
            "changed": (rescued | overruled).sum(-1),
            "tv_limited": (reached & ~allowed).sum(-1),
        }
        exhausted = (reached & ~self._when_judged(judged.evidence)[2]).any(-1)
        spent += cost.where(reached, 0.0).nan_to_num(0.0).sum(-1)
        spent[exhausted] = float("inf")
        return {**self.observed_by_inner(replace(judged, accepted=accepted & allowed)), **counts}

    def explain(self, judged: Judged) -> Mapping[str, Tensor]:
        """`rescued`, kept drafts that the same dice under the exact rule would have rejected, and `step_tv`, the cost."""
        return {"rescued": _decisions(judged)[0], "step_tv": self._decided(judged.evidence)[1]}

    def _allowed(self, evidence: Evidence) -> Tensor:
        """`(batch, width)`, where the inner rule may decide. The prefix says so, never the draft itself: of this round what
        stands before it, of earlier ones the ledger."""
        cheap, _, within = self._whole(evidence)
        return _shown(cheap & within, evidence)

    def _decided(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """`(batch, width)`, of a round that was judged: where the inner rule decided, and what each step cost in double
        precision, 0 where it did not."""
        cheap, cost, within = self._when_judged(evidence)
        return cheap & within, cost.where(cheap & within, 0.0)

    def _when_judged(self, evidence: Evidence) -> tuple[Tensor, Tensor, Tensor]:
        """What `_whole` said when the positions were judged."""
        if evidence.whole is None:
            return self._whole(evidence)
        return self._ledger.kept(evidence.tokens.shape[1])

    def _whole(self, evidence: Evidence) -> tuple[Tensor, Tensor, Tensor]:
        """Of the whole draft: steps that are cheap enough, their cost, and steps up to which the budget lasts."""
        whole = evidence if evidence.whole is None else evidence.whole
        cost = self._ledger.cost(self.inner, whole)
        every = torch.ones_like(cost, dtype=torch.bool)
        if self.max_step_tv == self.tv_budget == float("inf"):
            return every, cost, every
        cheap = cost <= self.max_step_tv  # not NaN
        if self.tv_budget == float("inf"):
            return cheap, cost, every
        total = self._ledger.of(evidence)[:, None] + cost.where(cheap, 0.0).cumsum(-1)
        return cheap, cost, total <= self.tv_budget


def _shown(values: Tensor, evidence: Evidence) -> Tensor:
    """Of values for the whole draft, those of the positions that `evidence` is about."""
    if evidence.whole is None:
        return values
    if evidence.index is not None:
        return values.gather(-1, evidence.index.to(values.device)[:, None])
    return values[:, evidence.first : evidence.first + evidence.tokens.shape[1]]


def _decisions(judged: Judged) -> tuple[Tensor, Tensor]:
    """`(batch, width)`, drafts kept that the same dice under the exact rule would have rejected, and drafts kept by it that
    were rejected for another token."""
    evidence = judged.evidence
    exact = exact_acceptance(evidence)
    uniforms = torch.full_like(exact, 0.5, dtype=torch.float64) if judged.uniforms is None else judged.uniforms
    kept_if_exact = sent(uniforms, exact.device)[:, : exact.shape[1]] < exact
    reached, accepted = (sent(each, exact.device) for each in (judged.reached, judged.accepted))
    other = torch.ones_like(reached)
    if judged.next_tokens is not None:
        other = evidence.tokens != sent(judged.next_tokens, exact.device)[:, None]
    return accepted & ~kept_if_exact, reached & ~accepted & kept_if_exact & other
