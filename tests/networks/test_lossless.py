"""Chains of drafter networks leave greedy texts and sampled laws as they are, whatever the target's family."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec import RCSDConfig
from hf_specdec.networks import AutoDrafter
from tests.families import FAMILIES
from tests.networks import small_target
from tests.networks.copies import FIRST, attending_pair, overfit, recalling_pair
from tests.test_families import ONE_PROMPT, RAGGED_PROMPTS, assert_same, prompts
from tests.test_sampling import Fit


TARGETS = "gemma2 gemma3 llama mistral mixtral olmo2 phi3 qwen2 qwen2-sliding qwen3".split()
NEW_TOKENS = 16
CONFIG = RCSDConfig(steps=4, on_drafter_error="raise")


@cache
def target(name):
    return FAMILIES[name].build(FAMILIES[name].attentions[-1])


@cache
def plain(name, lengths):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return target(name).generate(**prompts(lengths), **options, return_dict_in_generate=True, output_logits=True)


@cache
def drafter(name, family):
    """Trained on the ragged texts themselves, so that it is right sometimes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = None if family == "eagle" else torch.arange(0, 64, 3)
        network = AutoDrafter.from_target(target(name), family, draft_token_ids=ids)
        sequences = plain(name, RAGGED_PROMPTS).sequences
        mask = torch.nn.functional.pad(prompts(RAGGED_PROMPTS)["attention_mask"], (0, NEW_TOKENS), value=1)
        return overfit(network, target(name), sequences, mask)


@pytest.mark.parametrize("lengths", [ONE_PROMPT, RAGGED_PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_texts_are_the_targets_own(name, family, lengths):
    output = target(name).generate(
        **prompts(lengths),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        assistant_model=drafter(name, family),
        speculative_config=CONFIG,
    )
    assert_same(output.sequences, plain(name, lengths), NEW_TOKENS)
    stats = output.speculative_stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    if lengths == RAGGED_PROMPTS:
        assert stats.num_accepted_tokens > 0


# --- always right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("pair", [attending_pair, recalling_pair])
def test_a_drafter_that_copies_its_target_is_always_right(pair, steps):
    """tau, the tokens per round, is then the depth of the draft and the bonus token."""
    model, network = pair()
    inputs = {"input_ids": torch.tensor([[FIRST, 5, 9, 3]]), "attention_mask": torch.ones(1, 4).long()}
    num_rounds = 5
    options = {"max_new_tokens": 1 + num_rounds * (steps + 1), "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert len(set(expected[0].tolist())) > 4
    out = model.generate(
        **inputs,
        **options,
        assistant_model=network,
        speculative_config=RCSDConfig(steps=steps, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculative_stats.tokens_per_round == steps + 1


# --- sampling -------------------------------------------------------------------------------------------------------

PROMPT = (4, 6, 2, 2, 7, 1, 5, 3, 1, 7, 2)  # longer than any window
SETTINGS = {"T=1": {}, "T=2,top_k=4": {"temperature": 2.0, "top_k": 4}}


@cache
def small_vocabulary(name):
    family = FAMILIES[name]
    overrides = family.overrides | {"vocab_size": 8, "initializer_range": 0.15}
    return replace(family, overrides=overrides).build(family.attentions[-1])


def joint_law(model, setting, depth=3):
    """`(vocab,) * depth`, from logits computed without a cache."""
    chain = LogitsProcessorList()
    if "temperature" in SETTINGS[setting]:
        chain = LogitsProcessorList([TemperatureLogitsWarper(2.0), TopKLogitsWarper(4)])
    joint = np.ones(())
    for length in range(depth):
        texts = torch.tensor([PROMPT])
        if length:
            tails = torch.cartesian_prod(*[torch.arange(8)] * length).view(-1, length)
            texts = torch.cat([texts.expand(len(tails), -1), tails], 1)
        with torch.no_grad():
            law = chain(None, model(texts).logits[:, -1].double()).softmax(-1).numpy()
        joint = joint[..., None] * law.reshape([8] * (length + 1))
    return joint


@cache
def small_drafter(name, family):
    """Untrained but for its head, with a part of the vocabulary where there is a choice."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids = None if family == "eagle" else torch.tensor([0, 2, 3, 5, 6, 7])
        return AutoDrafter.from_target(small_vocabulary(name), family, draft_token_ids=ids)


@pytest.mark.parametrize(
    ("name", "setting"), [*((name, "T=1") for name in TARGETS), ("llama", "T=2,top_k=4"), ("phi3", "T=2,top_k=4")]
)
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_sampled_texts_follow_the_targets_joint_law(name, family, setting):
    model = small_vocabulary(name)
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)).long(),
        assistant_model=small_drafter(name, family),
        speculative_config=RCSDConfig(steps=2, on_drafter_error="raise"),
        do_sample=True,
        max_new_tokens=3,
        num_return_sequences=1200,
        return_dict_in_generate=True,
        pad_token_id=0,
        **{"top_k": 0, **SETTINGS[setting]},
    )
    assert 0 < out.speculative_stats.num_accepted_tokens < out.speculative_stats.num_verified_tokens
    fit = Fit.of(out.sequences, joint_law(model, setting))
    assert fit.good, fit


def test_a_target_with_all_draft_tokens_banned_decodes_plainly():
    """Where processors leave no drafted token, there is no law to draw from, and a round drafts nothing."""
    model = small_target()
    network = AutoDrafter.from_target(model, draft_token_ids=torch.tensor([3, 4, 5]))
    options = {"max_new_tokens": 8, "do_sample": True, "suppress_tokens": [3, 4, 5], "pad_token_id": 0}
    out = model.generate(
        torch.tensor([[7, 8, 9]]),
        attention_mask=torch.ones(1, 3).long(),
        **options,
        assistant_model=network,
        speculative_config=CONFIG,
        return_dict_in_generate=True,
    )
    assert out.speculative_stats.num_draft_tokens == 0
    assert not set(out.sequences[0, 3:].tolist()) & {3, 4, 5}
