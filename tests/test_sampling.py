"""Sampling end to end: texts drawn through `generate` against the target's own joint law, enumerated token by token."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec import SpeculativeConfig
from hf_specdec.acceptance import Exact
from hf_specdec.drafters import AssistantDrafter, DrafterBase
from tests.toys import noisy_copy, prompts, tiny_llama


VOCAB_SIZE = 8
PROMPT = (5, 3, 1, 7, 0, 0, 0)  # prompt lookup has a match for half of all first tokens and is right for half of those
NEW_TOKENS = 4  # the prompt's own token, then rounds of up to two drafts and a bonus
NUM_TEXTS = 1600  # of each drafter, so 4800 of each setting
WARPERS = {  # in the order in which transformers applies them
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
SETTINGS = {
    "T=1": {},
    "top_k=3": {"top_k": 3},
    "top_p=.7": {"top_p": 0.7},
    "min_p=.1": {"min_p": 0.1},
    "T=.5,top_k=4": {"temperature": 0.5, "top_k": 4},
    "T=2,top_k=2": {"temperature": 2.0, "top_k": 2},
}


@cache
def target():
    return tiny_llama(seed=6, vocab_size=VOCAB_SIZE, layers=1)


@cache
def draft_model():
    return noisy_copy(target(), noise=0.4)


@cache
def joint_law(eos=None, new_tokens=NEW_TOKENS, **warpers):
    """`(vocab,) * new_tokens`, from logits computed without a cache; after `eos` a text goes on with `eos` itself."""
    chain = LogitsProcessorList([WARPERS[name](warpers[name]) for name in WARPERS if name in warpers])
    joint = np.ones(())
    for depth in range(new_tokens):
        prefixes = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * depth).view(-1, depth) if depth else None
        texts = torch.tensor([PROMPT])
        if depth:
            texts = torch.cat([texts.expand(len(prefixes), -1), prefixes], 1)
        with torch.no_grad():
            law = chain(None, target()(texts).logits[:, -1].double()).softmax(-1).numpy()
        if eos is not None and depth:
            law[(prefixes == eos).any(-1).numpy()] = np.eye(VOCAB_SIZE)[eos]
        joint = joint[..., None] * law.reshape([VOCAB_SIZE] * (depth + 1))
    return joint


@dataclass
class Fit:
    """How texts fit a law: the chi-square test's p-value, and the texts that the law cannot produce."""

    p_value: float
    num_impossible: int

    @classmethod
    def of(cls, sequences, law):
        observed = np.zeros_like(law)
        np.add.at(observed, tuple(sequences[:, -law.ndim :].T.numpy()), 1)
        expected = len(sequences) * law
        common, rare = expected >= 5, (expected < 5) & (law > 0)
        cells = [np.append(each[common], each[rare].sum()) for each in (observed, expected)]
        num_impossible = int(observed[law == 0].sum())
        if num_impossible:
            return cls(0.0, num_impossible)
        possible = cells[1] > 0
        return cls(float(chisquare(cells[0][possible], cells[1][possible]).pvalue), 0)

    @property
    def good(self):
        return self.p_value > 1e-4 and self.num_impossible == 0


def texts_of(assistant, *, num_texts=NUM_TEXTS, **options):
    """`num_texts` texts in one batch, each row with its own stream; the statistics must show that drafts were judged."""
    config = {"drafting": "model", "length": 3, "on_drafter_error": "raise"}
    config |= {name: options.pop(name) for name in ("drafting", "length", "batching") if name in options}
    out = target().generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),  # token 0 is no padding here
        assistant_model=assistant,
        speculative_config=SpeculativeConfig(**config),
        do_sample=True,
        max_new_tokens=options.pop("new_tokens", NEW_TOKENS),
        num_return_sequences=num_texts,
        return_dict_in_generate=True,
        **{"top_k": 0, **options},
    )
    assert 0 < out.speculative_stats.num_accepted_tokens < out.speculative_stats.num_verified_tokens
    return out.sequences


# --- the law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", ["model", "hybrid", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_texts_follow_the_targets_joint_law(setting, drafting):
    assistant, new_tokens = (None, 3) if drafting == "ngram" else (draft_model(), NEW_TOKENS)
    sequences = texts_of(assistant, drafting=drafting, new_tokens=new_tokens, **SETTINGS[setting])
    law = joint_law(new_tokens=new_tokens, **SETTINGS[setting])
    assert law.sum() == pytest.approx(1.0)
    assert (law == 0).any() == (setting != "T=1")
    fit = Fit.of(sequences, law)
    assert fit.good, fit


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_rows_that_end_early_follow_it_too(batching):
    eos = 4
    sequences = texts_of(
        draft_model(), batching=batching, eos_token_id=eos, pad_token_id=eos, temperature=2.0, num_texts=2000
    )
    law = joint_law(eos=eos, temperature=2.0)
    assert law[eos].sum() == pytest.approx(law[eos, eos, eos, eos])
    fit = Fit.of(sequences, law)
    assert fit.good, fit


def test_sampled_drafts_may_be_judged_as_point_masses():
    """Whatever a draft was drawn from: accepted with `p` and else replaced by the rest of `p`, it leaves `p`."""
    sequences = texts_of(lambda settings: Misled(settings, "point masses"), temperature=2.0, num_texts=2000)
    assert Fit.of(sequences, joint_law(temperature=2.0)).good


# --- planted bugs ---------------------------------------------------------------------------------------------------


class Misled(DrafterBase):
    """A drafter whose drafts come from another law than the one it reports."""

    def __init__(self, settings, bug):
        super().__init__(settings)
        honest = replace(settings, keep_logits=True, do_sample=bug != "argmax drafts, soft law")
        self.inner, self.bug = AssistantDrafter(honest, draft_model()), bug

    def propose(self, context, budget):
        draft = self.inner.propose(context, budget)
        if draft.width == 0:
            return draft
        if self.bug == "unprocessed law":
            return replace(draft, q=draft.logits.softmax(-1))
        if self.bug == "argmax drafts, soft law":
            return replace(draft, q=(draft.logits / 2).softmax(-1))
        if self.bug == "law of the position before":
            return replace(draft, q=draft.q.roll(1, dims=1))
        if self.bug == "point masses":
            return replace(draft, q=None)
        raise AssertionError(self.bug)


@pytest.mark.parametrize("bug", ["unprocessed law", "argmax drafts, soft law", "law of the position before"])
def test_a_wrong_draft_law_is_caught(bug):
    """The same check, at temperature 0.5. Libraries have shipped the first two bugs."""
    sequences = texts_of(lambda settings: Misled(settings, bug), temperature=0.5, num_texts=2000)
    assert Fit.of(sequences, joint_law(temperature=0.5)).p_value < 1e-7


@pytest.mark.parametrize("bug", ["correction from p", "acceptance of nine in ten"])
def test_a_wrong_rule_is_caught(bug, monkeypatch):
    if bug == "correction from p":
        monkeypatch.setattr(Exact, "replacement", lambda self, evidence: evidence.p[:, 0])
    else:
        monkeypatch.setattr(Exact, "acceptance", lambda self, evidence: torch.ones_like(evidence.p_token) * 0.9)
    sequences = texts_of(draft_model(), temperature=2.0, top_k=3, num_texts=2000)
    assert Fit.of(sequences, joint_law(temperature=2.0, top_k=3)).p_value < 1e-8


# --- seeds ----------------------------------------------------------------------------------------------------------


def sampled(model, inputs, seed, *, drafting="model", batching="auto", **options):
    torch.manual_seed(seed)
    config = SpeculativeConfig(drafting=drafting, batching=batching, on_drafter_error="raise")
    assistant = None if drafting == "ngram" else noisy_copy(model)
    return model.generate(
        **inputs,
        assistant_model=assistant,
        speculative_config=config,
        do_sample=True,
        max_new_tokens=12,
        **{"top_k": 0, "temperature": 1.5, **options},
    )


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
@pytest.mark.parametrize("drafting", ["model", "hybrid", "ngram"])
def test_a_seed_repeats_its_text_and_another_does_not(drafting, batching):
    model, inputs = tiny_llama(layers=1), prompts(3)
    first, again, other = (
        sampled(model, inputs, seed, drafting=drafting, batching=batching)[:, 7:] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not bool((first == other).all(-1).any())


def test_copies_of_one_prompt_get_different_texts():
    model = tiny_llama(layers=1)
    sequences = sampled(model, prompts(1), 1, num_return_sequences=8)
    assert len({tuple(row) for row in sequences.tolist()}) == 8


def test_the_first_row_of_a_batch_draws_what_it_draws_alone():
    """Rows advance on their own, and stream `b` is that of the run's seed plus `b`."""
    model, inputs = tiny_llama(layers=1), prompts(3)
    alone = {name: values[:1] for name, values in inputs.items()}
    assert torch.equal(sampled(model, inputs, 4)[:1], sampled(model, alone, 4))


def test_a_row_does_not_depend_on_what_its_neighbours_say():
    model, inputs = tiny_llama(layers=1), prompts(3)
    others = {name: values.clone() for name, values in inputs.items()}
    others["input_ids"][0], others["input_ids"][2, 4:] = 9, 11
    ours, theirs = sampled(model, inputs, 4), sampled(model, others, 4)
    assert torch.equal(ours[1], theirs[1])
    assert not torch.equal(ours[0, 7:], theirs[0, 7:])


def test_plain_sampling_still_has_the_seed_to_itself():
    """A speculative run before it changes a plain one only through the one number it takes."""
    model, inputs = tiny_llama(layers=1), prompts(1)
    sampled(model, inputs, 5)
    after = model.generate(**inputs, do_sample=True, max_new_tokens=6)
    torch.manual_seed(5)
    torch.randint(2**62, (1,))
    assert torch.equal(model.generate(**inputs, do_sample=True, max_new_tokens=6), after)
