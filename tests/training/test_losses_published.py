"""The losses of HASS and EAGLE-3 against sums written out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses.base import Unrolled
from hf_specdec.training.losses.eagle3 import Eagle3Loss
from hf_specdec.training.losses.eal import EALLoss
from hf_specdec.training.losses.hass import HassLoss
from hf_specdec.training.losses.survival import on_draft_vocabulary
from hf_specdec.training.losses.topk import TopKLoss
from hf_specdec.training.losses.vat import VATLoss, greedy_survival
from hf_specdec.training.losses.wtv import WTVLoss


def case(with_states=True, vocab=7, draft_ids=None):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    width = vocab if draft_ids is None else len(draft_ids)
    masks = [torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool(), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()]
    return Unrolled(
        student_logits=[draw(2, 4, width) for _ in range(2)],
        target_logits=[draw(2, 4, vocab) * 2 for _ in range(2)],
        masks=masks,
        tokens=[torch.zeros(2, 4, dtype=torch.long)] * 2,
        target_ids=draft_ids,
        student_states=[draw(2, 4, 3) for _ in range(2)],
        target_states=[draw(2, 4, 3) * 2 for _ in range(2)] if with_states else (),
    )


def law(logits):
    exps = [math.exp(each) for each in logits]
    return [each / sum(exps) for each in exps]


def trained(unrolled):
    for step, mask in enumerate(unrolled.masks):
        for row, column in mask.nonzero().tolist():
            yield step, row, column


def test_hass():
    unrolled, parts = case(), {"feature": 0.0, "soft": 0.0, "topk": 0.0}
    for step, row, column in trained(unrolled):
        p = law(unrolled.target_logits[step][row, column].tolist())
        log_q = [math.log(each) for each in law(unrolled.student_logits[step][row, column].tolist())]
        cross = [-a * b for a, b in zip(p, log_q, strict=True)]
        parts["soft"] += sum(cross) / 5
        parts["topk"] += sum(cross[token] for token in sorted(range(7), key=lambda each: -p[each])[:2]) / 5
        gaps = (unrolled.student_states[step] - unrolled.target_states[step])[row, column].abs().tolist()
        parts["feature"] += sum(gap - 0.5 if gap > 1 else gap * gap / 2 for gap in gaps) / 3 / 5
    value = HassLoss(topk=2, topk_weight=0.5)(unrolled)
    assert value.parts == pytest.approx(parts, rel=1e-5)
    expected = parts["feature"] + 0.1 * parts["soft"] + 0.5 * parts["topk"]
    assert float(value.total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 5]])
def test_eagle3(ids):
    unrolled = case(draft_ids=None if ids is None else torch.tensor(ids))
    expected = 0.0
    for step, row, column in trained(unrolled):
        logits = unrolled.target_logits[step][row, column].tolist()
        if ids is not None and logits.index(max(logits)) not in ids:
            continue
        p = law([logits[token] for token in ids or range(7)])
        q = law(unrolled.student_logits[step][row, column].tolist())
        expected -= 0.8**step * sum(a * math.log(b) for a, b in zip(p, q, strict=True)) / 5
    assert float(Eagle3Loss()(unrolled).total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 5]])
def test_topk_alone(ids):
    unrolled, expected = case(with_states=False, draft_ids=None if ids is None else torch.tensor(ids)), 0.0
    for step, row, column in trained(unrolled):
        whole = law(unrolled.target_logits[step][row, column].tolist())
        p, q = [whole[token] for token in ids or range(7)], law(unrolled.student_logits[step][row, column].tolist())
        best = sorted(range(len(p)), key=lambda each: -p[each])[:2]
        expected -= 0.5**step * sum(p[each] * math.log(q[each]) for each in best) / 5
    assert float(TopKLoss(2, decay=0.5)(unrolled).total) == pytest.approx(expected, rel=1e-5)
    if ids is None:  # of all tokens it is the soft cross entropy
        assert float(TopKLoss(9)(unrolled).total) == pytest.approx(float(Eagle3Loss(1.0)(unrolled).total), rel=1e-6)
    with pytest.raises(InvalidConfigError, match="topk"):
        TopKLoss(0)


def test_hass_needs_features_to_compare_with():
    with pytest.raises(InvalidConfigError, match='family="eagle"'):
        HassLoss()(case(with_states=False))


def vat_case(accepted, ids=None, seed=0):
    """A chain of as many drafts as `accepted` says at each of its columns, with the survival head's logits."""
    generator = torch.Generator().manual_seed(seed)
    vocab, steps, columns = 7, 4, len(accepted)
    chosen = list(range(vocab)) if ids is None else ids
    target = [torch.randn(1, columns, vocab, generator=generator) for _ in range(steps)]
    student = [torch.randn(1, columns, len(chosen), generator=generator) for _ in range(steps)]
    for step in range(steps):
        for column, count in enumerate(accepted):
            best = chosen[(step + column) % len(chosen)]
            target[step][0, column, best] = 5.0
            # Beyond the first rejected draft the best tokens agree again, which must not revive the chain.
            place = chosen.index(best) if step != count else (chosen.index(best) + 1) % len(chosen)
            student[step][0, column, place] = 5.0
    masks = [torch.ones(1, columns, dtype=torch.bool)] * 3 + [
        torch.tensor([[column != 1 for column in range(columns)]])
    ]
    return Unrolled(
        student_logits=[each.requires_grad_() for each in student],
        target_logits=target,
        masks=masks,
        tokens=[torch.zeros(1, columns, dtype=torch.long)] * steps,
        target_ids=None if ids is None else torch.tensor(ids),
        survival_logits=[torch.randn(1, columns, generator=generator) for _ in range(steps)],
    )


@pytest.mark.parametrize("ids", [None, [0, 2, 3, 5]])
def test_vat(ids):
    accepted = [0, 1, 2, 4]
    unrolled, weighted, survival = vat_case(accepted, ids), 0.0, 0.0
    for step, row, column in trained(unrolled):
        survives = step < accepted[column]
        assert bool(greedy_survival(unrolled)[step][row, column]) == survives
        weight = 1.0 if step <= accepted[column] else 0.8 ** (step - accepted[column])
        logits = unrolled.target_logits[step][row, column].tolist()
        p = law([logits[token] for token in ids or range(7)])
        log_q = [math.log(each) for each in law(unrolled.student_logits[step][row, column].tolist())]
        best = (ids or list(range(7))).index(logits.index(max(logits)))
        weighted -= weight * (sum(a * b for a, b in zip(p, log_q, strict=True)) + log_q[best]) / 4
        chance = 1 / (1 + math.exp(-float(unrolled.survival_logits[step][row, column])))
        survival -= math.log(chance if survives else 1 - chance) / 4
    value = VATLoss(survival_weight=0.5)(unrolled)
    assert value.parts == pytest.approx({"weighted": weighted, "survival": survival}, rel=1e-5)
    assert float(value.total.detach()) == pytest.approx(weighted + 0.5 * survival, rel=1e-5)


def test_vat_rejects_what_cannot_be_drafted():
    unrolled = vat_case([4], [0, 2, 3, 5])
    unrolled.target_logits[1][0, 0, 6] = 9.0  # the target's best token at draft 1 is no draft token
    assert greedy_survival(unrolled)[:, 0, 0].tolist() == [True, False, False, False]
    pulls = torch.autograd.grad(VATLoss()(unrolled).total, unrolled.student_logits)
    assert [bool(pull.any()) for pull in pulls] == [True, False, True, True]


def test_vat_without_a_head_or_with_a_growing_weight_is_refused():
    with pytest.raises(InvalidConfigError, match="survival=True"):
        VATLoss()(replace(vat_case([1]), survival_logits=()))
    with pytest.raises(InvalidConfigError, match="decay"):
        VATLoss(decay=1.5)


@pytest.mark.parametrize("loss", [Eagle3Loss(), VATLoss(), EALLoss(), WTVLoss(), WTVLoss(ratio=True)])
def test_a_draft_vocabulary_may_come_in_any_order(loss):
    """As a loaded drafter's `d2t` gives it; the law is the same one, its entries stand elsewhere."""
    ids, order = torch.tensor([0, 2, 3, 5]), torch.tensor([3, 2, 1, 0])
    tokens, survival = torch.tensor([[0, 2, 4, 5], [3, 3, 6, 0]]), torch.zeros(2, 4)
    unrolled = replace(case(draft_ids=ids), tokens=[tokens] * 2, survival_logits=[survival] * 2)
    moved = replace(
        unrolled, target_ids=ids[order], student_logits=[each[..., order] for each in unrolled.student_logits]
    )
    assert float(loss(moved).total) == pytest.approx(float(loss(unrolled).total), rel=1e-6)
    assert on_draft_vocabulary(torch.tensor([[5, 4]]), ids[order])[1].tolist() == [[True, False]]
