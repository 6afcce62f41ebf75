"""Acceptance-aware losses: identities, enumeration, and what masks and draft vocabularies do."""

import itertools

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import EALLoss, KLLoss, LKLoss, Unrolled, WTVLoss


STEPS, VOCAB = 3, 7


def unrolled(*, steps=STEPS, rows=2, columns=4, vocab=VOCAB, ids=None, same=False, masks=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def logits(size):
        return [torch.randn(rows, columns, size, generator=generator, dtype=torch.float32) for _ in range(steps)]

    target = logits(vocab)
    size = vocab if ids is None else len(ids)
    student = [each.clone() for each in target] if same else logits(size)
    return Unrolled(
        [each.requires_grad_() for each in student],
        target,
        masks or [torch.ones(rows, columns, dtype=torch.bool)] * steps,
        [each.softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(rows, columns) for each in target],
        None if ids is None else torch.tensor(ids),
    )


def gradients(total, chain):
    return torch.autograd.grad(total, list(chain.student_logits))


def test_equal_laws_miss_nothing_and_pull_nowhere():
    chain = unrolled(same=True)
    # The ratio form pulls on single texts, and in their mean only is at rest.
    assert abs(float(WTVLoss(kl_weight=0.0, ratio=True)(chain).total.detach())) < 1e-6
    for loss in (WTVLoss(kl_weight=0.0), KLLoss(), LKLoss("alpha")):
        value = loss(chain).total
        assert abs(float(value.detach())) < 1e-6
        assert max(float(each.abs().max()) for each in gradients(value, chain)) < 1e-6


def test_one_step_of_wtv_is_the_total_variation():
    chain = unrolled(steps=1)
    p, q = chain.target_logits[0].softmax(-1), chain.student_logits[0].softmax(-1)
    expected = 0.5 * (p - q).abs().sum(-1).mean()
    for ratio in (False, True):
        torch.testing.assert_close(WTVLoss(kl_weight=0.0, ratio=ratio)(chain).total, expected)
    torch.testing.assert_close(WTVLoss(temperature=0.5, kl_weight=0.0)(chain).total, _variation(chain, 0.5))


@pytest.mark.parametrize("loss", [WTVLoss(), WTVLoss(smoothing=0.1), WTVLoss(ratio=True), EALLoss(), LKLoss("alpha")])
def test_laws_without_any_overlap_give_finite_losses_and_gradients(loss):
    """Of one column of one step; all others overlap, and go on to be learnt."""
    chain = unrolled()
    for logits, best in ((chain.student_logits, 2), (chain.target_logits, 5)):
        with torch.no_grad():
            logits[1][0, 0] = torch.eye(VOCAB)[best] * 300.0
    p, q = (each[1][0, 0].softmax(-1) for each in (chain.target_logits, chain.student_logits))
    assert torch.minimum(p, q).sum() == 0
    value = loss(chain).total
    assert bool(value.isfinite())
    found = gradients(value, chain)
    assert all(bool(each.isfinite().all()) for each in found)
    assert bool((found[1][1].abs().sum(-1) > 0).all())


def _variation(chain, temperature):
    p, q = ((each[0] / temperature).softmax(-1) for each in (chain.target_logits, chain.student_logits))
    return 0.5 * (p - q).abs().sum(-1).mean()


def test_one_step_of_eal_is_the_probability_of_the_best_token():
    chain = unrolled(steps=1)
    best = chain.target_logits[0].argmax(-1, keepdim=True)
    expected = 1 - chain.student_logits[0].softmax(-1).gather(-1, best).mean()
    torch.testing.assert_close(EALLoss(kl_weight=0.0)(chain).total, expected)


def test_eal_pulls_like_a_cross_entropy_with_the_weights_of_its_derivative():
    chain = unrolled()
    best = [each.argmax(-1, keepdim=True) for each in chain.target_logits]
    log_a = torch.stack(
        [each.log_softmax(-1).gather(-1, token)[..., 0] for each, token in zip(chain.student_logits, best, strict=True)]
    )
    reached = log_a.cumsum(0).exp().detach()
    weights = reached.flip(0).cumsum(0).flip(0)  # sum over j >= k of prod_{i <= j} a_i
    cross_entropy = -(weights * log_a).sum() / (STEPS * log_a[0].numel())
    own = gradients(EALLoss(kl_weight=0.0)(chain).total, chain)
    for one, other in zip(own, gradients(cross_entropy, chain), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ids", [None, (0, 2)])
def test_the_ratio_form_is_the_expected_length_of_sampled_decoding(ids):
    """Over all texts of a toy with memory, weighted by the target's law."""
    vocab, generator = 3, torch.Generator().manual_seed(3)
    drafted = range(vocab) if ids is None else ids
    target = {prefix: torch.randn(vocab, generator=generator) for prefix in ((), *((x,) for x in range(vocab)))}
    student = {prefix: torch.randn(len(drafted), generator=generator) for prefix in target}

    def overlap(prefix):
        p, q = target[prefix].softmax(-1), torch.zeros(vocab)
        q[list(drafted)] = student[prefix].softmax(-1)
        return torch.minimum(p, q)

    exact = sum(float(overlap(())[x]) * (1 + float(overlap((x,)).sum())) for x in range(vocab))
    mean = plain = 0.0
    for first, second in itertools.product(range(vocab), repeat=2):
        prefixes = ((), (first,))
        weight = target[()].softmax(-1)[first] * target[first,].softmax(-1)[second]
        chain = Unrolled(
            [student[prefix].view(1, 1, -1) for prefix in prefixes],
            [target[prefix].view(1, 1, -1) for prefix in prefixes],
            [torch.ones(1, 1, dtype=torch.bool)] * 2,
            [torch.tensor([[first]]), torch.tensor([[second]])],
            None if ids is None else torch.tensor(ids),
        )
        mean += float(weight * 2 * (1 - WTVLoss(kl_weight=0.0, ratio=True)(chain).total))
        plain += float(weight * 2 * (1 - WTVLoss(kl_weight=0.0)(chain).total))
    assert mean == pytest.approx(exact, abs=1e-6)
    assert plain != pytest.approx(exact, abs=1e-3)


LOSSES = [EALLoss(), WTVLoss(), WTVLoss(ratio=True), KLLoss(), LKLoss("alpha"), LKLoss("lambda")]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_mask_ends_the_chain(loss):
    """What follows a draft that is off, and the columns where nothing is trained, have no say."""
    on = torch.ones(2, 4, dtype=torch.bool)
    first, second = on.clone(), on.clone()
    first[:, 3], second[:, 2:] = False, False
    masks = [first, second, second & torch.tensor([[True, False, True, True]] * 2)]
    chain = unrolled(masks=masks)
    for gradient, mask in zip(gradients(loss(chain).total, chain), masks, strict=True):
        assert not gradient[~mask].any()
        assert gradient[mask].abs().sum(-1).min() > 0


@pytest.mark.parametrize("loss", [WTVLoss(kl_weight=0.0), EALLoss(kl_weight=0.0), LKLoss("alpha")], ids=str)
def test_what_cannot_be_drafted_is_lost(loss):
    """A perfect drafter over a part of the vocabulary still misses the rest: the target's mass is not renormalised."""
    whole = unrolled(steps=1, same=True)
    ids = (0, 1, 2, 3)
    part = Unrolled(
        [whole.target_logits[0][..., list(ids)]], whole.target_logits, whole.masks, whole.tokens, torch.tensor(ids)
    )
    p = whole.target_logits[0].softmax(-1)
    kept = p[..., :4].sum(-1)
    best = p.argmax(-1)
    expected = {
        WTVLoss: 1 - kept.mean(),
        LKLoss: -kept.log().mean(),
        EALLoss: 1 - torch.where(best < 4, p.max(-1).values / kept, 1e-6).mean(),
    }[type(loss)]
    torch.testing.assert_close(loss(part).total, expected)


def test_smoothing_keeps_late_drafts_in_the_gradient():
    chain = unrolled()
    with torch.no_grad():
        best = chain.target_logits[0].argmax(-1, keepdim=True)
        chain.student_logits[0].scatter_(-1, best, -30.0)  # the first draft is never right
    plain = gradients(EALLoss(kl_weight=0.0)(chain).total, chain)
    smooth = gradients(EALLoss(kl_weight=0.0, smoothing=0.5)(chain).total, chain)
    assert float(plain[1].abs().max()) < 1e-5 < 1e-3 < float(smooth[1].abs().max())


def test_the_weight_of_lk_is_not_differentiated():
    chain = unrolled(steps=1)
    p, log_q = chain.target_logits[0].softmax(-1), chain.student_logits[0].log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    weight = (-3.0 * overlap).exp().detach()
    expected = (weight * (p * (p.log() - log_q)).sum(-1) + (1 - weight) * (1 - overlap)).mean()
    total = LKLoss()(chain).total
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradients(total, chain)[0], gradients(expected, chain)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WTVLoss(temperature=0.0), "above 0"),
        (lambda: WTVLoss(ratio=True, smoothing=0.1), "not both"),
        (lambda: LKLoss("beta"), "alpha"),
    ],
)
def test_wrong_options_are_explained(make, message):
    with pytest.raises(InvalidConfigError, match=message):
        make()
