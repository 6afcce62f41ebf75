"""Pure probability, against scipy and against the identities that speculative decoding rests on."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy
from transformers import TemperatureLogitsWarper

from hf_specdec.laws import entropy, one_hot, residual, top_overlap, total_variation, without_token


BANNED = float("-inf")


def random_laws(*shape, seed=0, zeros=True, dtype=torch.float64):
    """Laws of which some tokens have no probability."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    if zeros:
        banned = torch.rand(*shape, generator=generator) < 0.3
        banned[..., 0] = False
        logits = logits.masked_fill(banned, BANNED)
    return logits.softmax(-1).to(dtype)


def sums_to_one(laws, tolerance=1e-12):
    return bool(((laws.sum(-1) - 1).abs() < tolerance).all()) and bool((laws >= 0).all())


# --- one_hot --------------------------------------------------------------------------------------------------------


def test_one_hot_puts_all_mass_on_the_token():
    tokens = torch.tensor([[0, 3], [2, 2]])
    law = one_hot(tokens, 4, torch.float64)
    assert law.shape == (2, 2, 4)
    assert law.dtype == torch.float64
    assert torch.equal(law.argmax(-1), tokens)
    assert sums_to_one(law, 0.5e-15)


# --- residual -------------------------------------------------------------------------------------------------------


def test_the_residual_is_the_normalised_excess_of_the_target():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.8, 0.0, 0.2, 0.0]))


def test_accepted_mass_and_residual_make_up_the_target():
    p, q = random_laws(200, 7, seed=1), random_laws(200, 7, seed=2)
    rejected = total_variation(p, q)[..., None]
    law = residual(p, q)
    assert sums_to_one(law)
    assert float((torch.minimum(p, q) + rejected * law - p).abs().max()) < 1e-15


def test_the_residual_never_draws_what_the_draft_over_proposes():
    p, q = random_laws(200, 7, seed=1), random_laws(200, 7, seed=2)
    assert bool((residual(p, q)[(q >= p) & (p != q)] == 0).all())


def test_a_residual_without_mass_is_the_target_itself():
    p = random_laws(5, 6, seed=4)
    assert torch.equal(residual(p, p), p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_residual_of_rounding_errors_is_still_a_law(dtype):
    p = random_laws(50, 6, seed=5).to(dtype)
    nearly = (p * (1 + torch.finfo(dtype).eps)).to(dtype)
    law = residual(p, nearly)
    assert bool(law.isfinite().all())
    assert bool((law.sum(-1).double() - 1).abs().max() < 0.02)


def test_the_residual_of_disjoint_laws_is_the_target():
    p, q = torch.tensor([0.4, 0.6, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert torch.equal(residual(p, q), p)


def test_the_residual_after_a_point_mass_removes_that_token():
    p = random_laws(20, 6, seed=6)
    tokens = torch.arange(20) % 6
    law = residual(p, one_hot(tokens, 6, p.dtype))
    certain = p.gather(-1, tokens[:, None])[:, 0] == 1
    torch.testing.assert_close(law[~certain], without_token(p, tokens)[~certain])


# --- without_token --------------------------------------------------------------------------------------------------


def test_a_token_is_removed_and_the_rest_keeps_its_proportions():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]])
    law = without_token(p, torch.tensor([0, 2]))
    torch.testing.assert_close(law, torch.tensor([[0.0, 0.5, 0.5], [0.1, 0.9, 0.0]]))


@pytest.mark.parametrize("kept", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_the_token_may_stay(kept):
    p = random_laws(30, 6, seed=7)
    tokens = torch.arange(30) % 6
    law = without_token(p, tokens, kept)
    expected = p.numpy().copy()
    expected[np.arange(30), tokens.numpy()] *= kept
    expected /= expected.sum(-1, keepdims=True)
    assert float((law - torch.from_numpy(expected)).abs().max()) < 1e-15
    assert sums_to_one(law)


def test_a_law_that_has_nothing_else_stays():
    p = one_hot(torch.tensor([2]), 4)
    assert torch.equal(without_token(p, torch.tensor([2])), p)


def test_what_is_left_is_a_law_however_little_it_is():
    p = torch.tensor([[1.0, 3e-44, 1e-44], [1.0, 2e-38, 0.0]])  # subnormal, and just above
    assert sums_to_one(without_token(p, torch.tensor([0, 0])), 1e-6)


def test_laws_are_not_changed_in_place():
    p, q = random_laws(3, 5, seed=8), random_laws(3, 5, seed=9)
    before = p.clone(), q.clone()
    residual(p, q), without_token(p, torch.tensor([0, 1, 2])), total_variation(p, q), entropy(p), top_overlap(p, q, 2)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


# --- total variation ------------------------------------------------------------------------------------------------


def test_total_variation_has_its_three_equal_forms():
    p, q = random_laws(200, 7, seed=1), random_laws(200, 7, seed=2)
    distance = total_variation(p, q)
    torch.testing.assert_close(distance, 1 - torch.minimum(p, q).sum(-1), atol=1e-14, rtol=0)
    torch.testing.assert_close(distance, (p - q).clamp(min=0).sum(-1), atol=1e-14, rtol=0)
    assert torch.equal(distance, total_variation(q, p))


def test_total_variation_at_its_ends():
    p = torch.tensor([0.4, 0.6, 0.0, 0.0])
    assert float(total_variation(p, p)) == 0
    assert float(total_variation(p, torch.tensor([0.0, 0.0, 0.5, 0.5]))) == 1


# --- entropy --------------------------------------------------------------------------------------------------------


def logits_with_bans(rows=100, vocab_size=9, seed=10):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    banned = torch.rand(rows, vocab_size, generator=generator) < 0.4
    banned[:, 0] = False
    return logits.masked_fill(banned, BANNED)


@pytest.mark.parametrize("base", [math.e, 2.0, 10.0])
def test_full_entropy_equals_scipys(base):
    logits = logits_with_bans()
    expected = scipy_entropy(softmax(logits.numpy(), axis=-1), base=base, axis=-1)
    assert np.abs(entropy(logits, "full", base=base).numpy() - expected).max() < 1e-14


def test_normalized_entropy_is_a_share_of_the_largest_possible_one():
    logits = logits_with_bans()
    expected = scipy_entropy(softmax(logits.numpy(), axis=-1), base=logits.shape[-1], axis=-1)
    assert np.abs(entropy(logits, "normalized").numpy() - expected).max() < 1e-14
    assert float(entropy(torch.zeros(9, dtype=torch.float64), "normalized")) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("top_k", [1, 3, 9, 50])
@pytest.mark.parametrize("base", [math.e, 2.0])
def test_topk_entropy_sums_the_largest_terms_without_normalising_them(top_k, base):
    logits = logits_with_bans()
    laws = np.sort(softmax(logits.numpy(), axis=-1), axis=-1)[:, ::-1][:, :top_k]
    terms = np.where(laws > 0, -laws * np.log(np.where(laws > 0, laws, 1)), 0).sum(-1) / np.log(base)
    assert np.abs(entropy(logits, "topk", top_k=top_k, base=base).numpy() - terms).max() < 1e-14


@pytest.mark.parametrize("kind", ["full", "topk", "normalized"])
def test_a_single_candidate_has_no_entropy(kind):
    logits = torch.full((1, 5), BANNED)
    logits[0, 3] = 7.0
    assert float(entropy(logits, kind)[0]) == 0


def test_entropies_of_a_whole_draft_keep_their_shape():
    assert entropy(torch.randn(2, 3, 8)).shape == (2, 3)


# --- overlap --------------------------------------------------------------------------------------------------------


def test_overlap_counts_common_candidates_in_any_order():
    first = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    second = torch.tensor([3.0, 5.0, 0.0, 4.0, 2.0, 1.0])
    shares = [float(top_overlap(first, second, top_n)) for top_n in (1, 2, 3, 4, 5, 6, 100)]
    assert shares == pytest.approx([0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 1, 1])


def test_overlap_against_sets():
    first, second = torch.randn(100, 12), torch.randn(100, 12)
    for top_n in (1, 4, 5, 7):
        expected = [
            len(set(a.argsort(descending=True)[:top_n].tolist()) & set(b.argsort(descending=True)[:top_n].tolist()))
            for a, b in zip(first, second, strict=True)
        ]
        assert torch.equal((top_overlap(first, second, top_n) * top_n).round().long(), torch.tensor(expected))


@pytest.mark.parametrize("top_n", range(1, 33))
def test_an_overlap_equal_to_its_threshold_reaches_it(top_n):
    """The published rule compares a share with a decimal; rounding must not decide the equal case."""
    for common in range(top_n + 1):
        first = torch.full((64,), -9.0)
        second = first.clone()
        first[:top_n] = torch.arange(top_n, 0, -1).float()
        second[top_n - common : 2 * top_n - common] = torch.arange(top_n, 0, -1).float()
        share = top_overlap(first, second, top_n)
        assert bool(share >= common / top_n), (common, top_n)
        assert not bool(share >= (common + 0.5) / top_n)


# --- low precision and extreme temperatures -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.008)])
def test_half_precision_inputs_give_half_precision_answers_and_no_nan(dtype, tolerance):
    logits = logits_with_bans()
    half = logits.to(dtype)
    p, q = half.softmax(-1), half.flip(0).softmax(-1)
    exact_p, exact_q = logits.softmax(-1), logits.flip(0).softmax(-1)
    tokens = torch.zeros(len(p), dtype=torch.long)
    pairs = [
        (entropy(half), entropy(logits)),
        (total_variation(p, q), total_variation(exact_p, exact_q)),
        (total_variation(p, q)[:, None] * residual(p, q), (exact_p - exact_q).clamp(min=0)),
        ((1 - p[:, :1]) * without_token(p, tokens), (1 - exact_p[:, :1]) * without_token(exact_p, tokens)),
    ]
    for ours, exact in pairs:
        assert ours.dtype == dtype
        assert bool(ours.isfinite().all())
        assert float((ours.double() - exact).abs().max()) < tolerance


def test_scores_of_a_vanishing_temperature_are_harmless():
    logits = logits_with_bans().float()
    scores = TemperatureLogitsWarper(1e-6)(None, logits)
    p, q = scores.softmax(-1), TemperatureLogitsWarper(1e-6)(None, logits.flip(0)).softmax(-1)
    assert torch.equal(p, one_hot(logits.argmax(-1), 9))
    assert bool((entropy(scores) == 0).all())
    same = p.argmax(-1) == q.argmax(-1)
    assert torch.equal(total_variation(p, q), (~same).float())
    assert torch.equal(residual(p, q), p)
    assert torch.equal(without_token(p, p.argmax(-1)), p)
