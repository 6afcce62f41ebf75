"""Exact acceptance: its two formulas, and what they come to when a drafter is wrong, right or silly."""

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.acceptance import ACCEPTANCE, Exact
from hf_specdec.drafters import ScriptedDrafter
from hf_specdec.laws import total_variation
from hf_specdec.records import Evidence
from tests.acceptance import random_scores
from tests.toys import drafters_for, prompts, tiny_llama


def evidence(tokens, scores, q=None, do_sample=True):
    tokens = torch.tensor(tokens)
    return Evidence(tokens, torch.ones_like(tokens, dtype=torch.bool), scores, scores, do_sample, q=q)


def test_the_rule_says_what_it_is():
    assert ACCEPTANCE["exact"] is Exact
    assert Exact().lossless
    assert not Exact().needs_draft_logits
    assert Exact().count(None, None) == {}


def test_acceptance_is_the_ratio_of_the_laws_capped_at_one():
    p = torch.tensor([[[0.5, 0.3, 0.2, 0.0]] * 4])
    q = torch.tensor([[[0.1, 0.6, 0.2, 0.1]] * 4])
    rule = Exact().acceptance(evidence([[0, 1, 2, 3]], p.log(), q))
    torch.testing.assert_close(rule, torch.tensor([[1.0, 0.5, 1.0, 0.0]]))


def test_a_point_mass_is_accepted_with_the_targets_probability():
    p = torch.tensor([[[0.5, 0.3, 0.2, 0.0]] * 4])
    rule = Exact().acceptance(evidence([[0, 1, 2, 3]], p.log()))
    torch.testing.assert_close(rule, p[:, 0])


@pytest.mark.parametrize("q", [None, torch.full((1, 4, 4), 0.25)])
def test_greedy_accepts_the_argmax_and_nothing_else(q):
    scores = torch.tensor([[[0.5, 0.6, 0.2, float("-inf")]] * 4])
    rule = Exact().acceptance(evidence([[0, 1, 2, 3]], scores, q, do_sample=False))
    assert rule.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_greedy_accepts_one_of_two_equal_maxima_as_argmax_does():
    scores = torch.tensor([[[0.0, 2.0, 2.0]] * 3])
    rule = Exact().acceptance(evidence([[0, 1, 2]], scores, do_sample=False))
    assert rule[0].argmax() == scores[0, 0].argmax()
    assert rule.sum() == 1


def test_an_unlikely_draft_does_not_divide_by_nothing():
    """The smallest numbers on either side: no NaN, no inf, and no acceptance without probability."""
    q = torch.tensor([[[1e-45, 1.0, 1e-45]] * 3])
    scores = torch.tensor([[[0.0, float("-inf"), float("-inf")]] * 3])
    assert Exact().acceptance(evidence([[0, 1, 2]], scores, q)).tolist() == [[1.0, 0.0, 0.0]]


def test_drafts_are_rejected_as_often_as_the_laws_differ():
    p = random_scores(0, 8, seed=1)[0].softmax(-1)
    q = random_scores(0, 8, seed=2)[0].softmax(-1)
    tokens = torch.arange(8)[None]
    rule = Exact().acceptance(evidence(tokens.tolist(), p.log().expand(1, 8, -1), q.expand(1, 8, -1)))
    assert float((q * rule[0]).sum()) == pytest.approx(1 - float(total_variation(p, q)), abs=1e-15)


@pytest.mark.parametrize("do_sample", [True, False])
def test_the_correction_never_repeats_a_point_mass(do_sample):
    p = torch.tensor([[[0.5, 0.3, 0.2]]] * 3)
    law = Exact().replacement(evidence([[0], [1], [2]], p.log(), do_sample=do_sample))
    if do_sample:
        expected = [[0.0, 0.6, 0.4], [0.5 / 0.7, 0.0, 0.2 / 0.7], [0.625, 0.375, 0.0]]
        torch.testing.assert_close(law, torch.tensor(expected))
    else:
        assert law.tolist() == [[1.0, 0.0, 0.0]] * 3  # row 0 is never rejected


# --- through generate -----------------------------------------------------------------------------------------------


def decode(model, inputs, drafter, *, tokens=16, **options):
    config = SpeculativeConfig(drafting=options.pop("drafting", "model"), length=4, on_drafter_error="raise")
    return model.generate(
        **inputs,
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **options,
    )


def plain(model, inputs, tokens=16):
    return model.generate(**inputs, do_sample=False, max_new_tokens=tokens)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_that_is_always_wrong_is_never_committed(batch_size, do_sample):
    """Token 63 is banned, so neither decoding may emit it; the first drafted token is verified like any other."""
    model, inputs = tiny_llama(), prompts(batch_size)
    options = {"do_sample": do_sample, "suppress_tokens": [63]}
    out = decode(model, inputs, lambda settings: ScriptedDrafter(settings, [[63] * 40]), **options)
    stats = out.speculative_stats
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == 0
    assert stats.acceptance_rate == 0.0
    assert not bool((out.sequences[:, 7:] == 63).any())
    if not do_sample:
        assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=16, **options))


def test_a_repeated_prompt_does_not_commit_its_repetition_unverified():
    """Prompt lookup proposes token 1 after [1, 1, 1]; the target says otherwise."""
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([[1, 1, 1]])}
    text = plain(model, inputs)
    assert int(text[0, 3]) != 1
    out = decode(model, inputs, None, drafting="ngram", do_sample=False)
    assert torch.equal(out.sequences, text)


@pytest.mark.parametrize("name", ["always", "sometimes", "never"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_vanishing_temperature_gives_the_greedy_text(name, batch_size):
    model, inputs = tiny_llama(), prompts(batch_size)
    drafter = drafters_for(model)[name]
    out = decode(model, inputs, drafter, do_sample=True, temperature=1e-6, top_k=0)
    assert torch.equal(out.sequences, plain(model, inputs))
    rates = {"always": lambda rate: rate == 1, "sometimes": lambda rate: 0 < rate < 1, "never": lambda rate: rate < 0.2}
    assert rates[name](out.speculative_stats.acceptance_rate)
