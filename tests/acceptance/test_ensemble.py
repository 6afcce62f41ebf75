"""The ensemble rule against transformers' own `assistant_ensemble_weight`."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.utils import _speculative_sampling

from hf_specdec import InvalidConfigError, SpeculativeConfig
from hf_specdec.acceptance import Ensemble
from tests.acceptance import joint_law, random_scores
from tests.toys import noisy_copy, prompts, tiny_llama


def ours(model, drafter, weight, inputs, *, tokens=24, **options):
    config = SpeculativeConfig(
        acceptance=Ensemble(weight), guard=None, drafting="model", length=4, on_drafter_error="raise",
        batching=options.pop("batching", "auto"),
    )  # fmt: skip
    return model.generate(
        **inputs, assistant_model=drafter, speculative_config=config, max_new_tokens=tokens, **options
    )


def stock(model, drafter, weight, inputs, *, tokens=24, **options):
    """Transformers' own assisted decoding with drafts of constant length, whatever the drafter is unsure of."""
    drafter.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model.generate(
        **inputs, assistant_model=drafter, assistant_ensemble_weight=weight, max_new_tokens=tokens, **options
    )


@pytest.mark.parametrize(
    "processors", [{}, {"suppress_tokens": [5, 17, 40], "no_repeat_ngram_size": 0}], ids=["none", "bans"]
)
@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_greedy_text_is_transformers_own_token_for_token(weight, processors, batching):
    """From the second token on: here the prompt's own token has no draft, there it has one."""
    changed = False
    for seed in range(3):
        model = tiny_llama(seed=seed, layers=1)
        drafter = noisy_copy(model, noise=0.4)
        text = ours(model, drafter, weight, prompts(), do_sample=False, batching=batching, **processors)
        start = {"input_ids": text[:, :8], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
        assert torch.equal(text, stock(model, drafter, weight, start, tokens=23, do_sample=False, **processors))
        changed |= not torch.equal(text, model.generate(**prompts(), do_sample=False, max_new_tokens=24, **processors))
    assert changed or weight == 0.8


@pytest.mark.parametrize("weight", [0.25, 0.7])
def test_the_sampled_law_is_that_of_transformers_function(weight):
    """Its code draws; the frequencies of 12000 runs against our enumerated law of a draft and a bonus."""
    torch.manual_seed(0)
    raw, draft = random_scores(1, 3, seed=1, dtype=torch.float32), random_scores(0, 3, seed=2, dtype=torch.float32)
    laws = [table.softmax(-1) for table in draft]
    joint = joint_law(Ensemble(weight), raw, laws, draft_logits=draft)
    observed = np.zeros((3, 3))
    num_draws = 12000
    drawn = torch.multinomial(laws[0], num_draws, replacement=True)
    for token in drawn.tolist():
        logits = torch.stack([raw[0], raw[1][token]])[None]
        tokens, _ = _speculative_sampling(
            torch.tensor([[0, token]]), draft[0][None, None], 1, logits, assistant_ensemble_weight=weight
        )
        first = int(tokens[0, 0])
        if tokens.shape[1] == 2:
            observed[first, int(tokens[0, 1])] += 1
        else:  # a rejection; what follows is drawn from the target
            observed[first] += raw[1][first].softmax(-1).numpy()
    first = observed.sum(-1)
    assert chisquare(first, num_draws * joint.sum(-1).numpy()).pvalue > 1e-3
    assert chisquare(first, num_draws * raw[0].softmax(-1).numpy()).pvalue < 0.01
    assert np.abs(observed / num_draws - joint.numpy()).max() < 0.02


@pytest.mark.parametrize("weight", [0.1, 0.6, 0.95])
def test_acceptance_and_correction_are_the_published_formulas(weight):
    raw, draft = random_scores(1, 7, seed=5), random_scores(0, 7, seed=6)
    p, q = raw[0].softmax(-1), draft[0].softmax(-1)
    joint = joint_law(Ensemble(weight), raw, [q], draft_logits=draft).sum(-1)
    coin = (1 - weight + weight * p / q).clamp(max=1)
    excess = (p - q).clamp(min=0)
    published = q * coin + (q * (1 - coin)).sum() * excess / excess.sum()
    torch.testing.assert_close(joint, published, atol=1e-14, rtol=0)
    distance = 0.5 * (joint - p).abs().sum()
    assert float(distance) == pytest.approx((1 - weight) * 0.5 * float((p - q).abs().sum()), abs=1e-14)


def test_a_drafter_whose_every_token_is_banned_leaves_the_target_alone():
    scores = [torch.tensor([float("-inf"), 2.0, 1.0]), torch.zeros(3, 3)]
    draft = [torch.tensor([5.0, float("-inf"), float("-inf")])]
    joint = joint_law(Ensemble(0.5), scores, None, path=[0], do_sample=False, draft_logits=draft)
    assert float(joint[1].sum()) == 1.0


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.1, float("nan")])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(InvalidConfigError, match="weight"):
        Ensemble(weight)
