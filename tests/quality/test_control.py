"""The control's law by enumeration, and in runs."""

import pytest
import torch
from scipy import stats

from hf_specdec import ExactConfig, SpeculativeConfig
from hf_specdec.acceptance import Exact
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import without_token
from hf_specdec.quality import RandomRejection
from hf_specdec.records import choice_law
from tests.acceptance import WARPERS, joint_law, random_scores, target_law, warped
from tests.toys import noisy_copy, tiny_llama


def one_step(rule, scores, law, do_sample=True, path=None):
    """`(vocab,)`, the law of the first token of a round with one draft."""
    laws = None if law is None else [law]
    return joint_law(rule, [scores[0], scores[1]], laws, do_sample=do_sample, path=path).sum(-1)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["T=1", "T=.5", "T=2"])
def test_the_sampled_law_is_the_written_out_mixture(rate, name):
    """`sum_x min(p, q)(x) ((1 - rate) 1_x + rate M_x) + (p - q)+`, with `M_x` the target without `x`."""
    scores = warped(random_scores(1, 5, seed=1), WARPERS[name])
    q = random_scores(0, 5, seed=2)[0].softmax(-1)
    p = scores[0].softmax(-1)
    common = torch.minimum(p, q)
    masked = torch.stack([without_token(p, torch.tensor(x)) for x in range(5)])
    expected = (1 - rate) * common + rate * (common[:, None] * masked).sum(0) + (p - q).clamp(min=0)
    torch.testing.assert_close(one_step(RandomRejection(rate), scores, q), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", WARPERS)
def test_without_a_rate_it_is_exact(name):
    scores = warped(random_scores(2, 5, seed=3), WARPERS[name])
    laws = [each.softmax(-1) for each in warped(random_scores(1, 5, seed=4), WARPERS[name])]
    torch.testing.assert_close(joint_law(RandomRejection(0.0), scores, laws), target_law(scores), atol=1e-12, rtol=0)
    assert RandomRejection(0.0).lossless
    assert not RandomRejection(0.01).lossless


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_greedily_an_aligned_draft_gives_way_to_the_runner_up(rate):
    scores = random_scores(1, 5, seed=5)
    first, second = scores[0].topk(2).indices.tolist()
    law = one_step(RandomRejection(rate), scores, None, do_sample=False, path=[first])
    expected = torch.zeros(5, dtype=torch.float64)
    expected[first], expected[second] = 1 - rate, rate
    torch.testing.assert_close(law, expected)
    other = one_step(RandomRejection(rate), scores, None, do_sample=False, path=[second])
    torch.testing.assert_close(other, choice_law(scores[0], False).double())


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_banned_token_is_never_drawn_and_a_single_one_never_rejected(do_sample):
    scores = random_scores(1, 4, seed=6)
    scores[0][[0, 2]] = -torch.inf
    q = torch.full((4,), 0.25, dtype=torch.float64)
    law = one_step(RandomRejection(0.7), scores, q, do_sample=do_sample)
    assert law[[0, 2]].tolist() == [0.0, 0.0]
    assert float(law.sum()) == pytest.approx(1.0)
    scores[0][1] = -torch.inf
    law = one_step(RandomRejection(1.0), scores, q, do_sample=do_sample)
    assert law.tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_only_the_control_throws_dice_greedily():
    assert RandomRejection(0.1).throws_dice
    assert not Exact().throws_dice
    assert not RandomRejection(0.1).needs_draft_logits


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_probability(rate):
    with pytest.raises(InvalidConfigError, match="rate must lie in"):
        RandomRejection(rate)


def decode(model, drafter, config, **options):
    found = []
    sequences = model.generate(
        torch.tensor([[1, 2, 3, 1, 2]]),
        assistant_model=drafter,
        speculative_config=config,
        stats_callback=found.append,
        pad_token_id=0,
        **options,
    )
    return sequences[:, 5:], found[0]


def config(rate, length=1):
    return SpeculativeConfig(
        acceptance=RandomRejection(rate), drafting="model", length=length, on_drafter_error="raise"
    )


def test_sampled_runs_follow_the_law():
    """Three tokens: the prompt's own, one that was drafted, one of the target. Chi-square of the first two."""
    model = tiny_llama(vocab_size=6, layers=1)
    drafter = noisy_copy(model, noise=0.5)
    rows, rate = 6000, 0.4
    torch.manual_seed(0)
    tokens, run = decode(
        model,
        drafter,
        config(rate),
        do_sample=True,
        temperature=2.0,
        top_k=0,
        max_new_tokens=3,
        num_return_sequences=rows,
    )
    law = torch.zeros(6, 6, dtype=torch.float64)
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    first = (model(prompt).logits[0, -1].double() / 2).softmax(-1)
    for token in range(6):
        text = torch.cat([prompt, torch.tensor([[token]])], -1)
        p, q = ((each(text).logits[0, -1].double() / 2).softmax(-1) for each in (model, drafter))
        common = torch.minimum(p, q)
        masked = torch.stack([without_token(p, torch.tensor(x)) for x in range(6)])
        law[token] = first[token] * (
            (1 - rate) * common + rate * (common[:, None] * masked).sum(0) + (p - q).clamp(min=0)
        )
    observed = torch.zeros(6, 6).index_put_((tokens[:, 0], tokens[:, 1]), torch.ones(rows), accumulate=True)
    assert stats.chisquare(observed.flatten().numpy(), (rows * law).flatten().detach().numpy()).pvalue > 0.001
    changed, kept = run.events["random_changed_token"], run.num_accepted_tokens
    assert stats.binomtest(changed, changed + kept, rate).pvalue > 0.001


def test_greedy_runs_reject_at_the_rate():
    """With the target as its own drafter every draft is aligned, and each is rejected with the same probability."""
    model, rate = tiny_llama(), 0.2
    torch.manual_seed(0)
    _, run = decode(model, model, config(rate, length=5), do_sample=False, max_new_tokens=200)
    assert run.num_accepted_tokens + run.events["random_changed_token"] == run.num_verified_tokens
    assert stats.binomtest(run.events["random_changed_token"], run.num_verified_tokens, rate).pvalue > 0.001


def test_greedy_runs_without_dice_leave_the_global_generator():
    model = tiny_llama()
    before = torch.get_rng_state()
    decode(model, noisy_copy(model), ExactConfig(drafting="model"), do_sample=False, max_new_tokens=8)
    decode(model, noisy_copy(model), config(0.5), do_sample=False, max_new_tokens=8, row_seeds=[1])
    assert torch.equal(torch.get_rng_state(), before)
