"""Drafter networks inside `generate`: other options, other threads, exceptions, and what is left behind."""

import threading
from functools import cache

import pytest
import torch

from hf_specdec import EASDConfig, RCSDConfig, SpeculativeConfig, TreeShape
from hf_specdec._compat import CACHE_KEY
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError, UnsupportedModelError
from hf_specdec.features import FeatureTap
from hf_specdec.networks import AutoDrafter
from tests.families import FAMILIES
from tests.networks import drafter_for, small_target
from tests.networks.copies import FIRST, attending_pair, recalling_pair
from tests.toys import prompts, state_of


CONFIG = RCSDConfig(steps=4, on_drafter_error="raise")
OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@cache
def target():
    return small_target()


@cache
def network():
    return drafter_for(target())


def both(inputs, config=CONFIG, model=None, assistant=None, **options):
    """What plain decoding gives, and the output of the speculative run."""
    model = target() if model is None else model
    options = OPTIONS | options
    expected = model.generate(**inputs, **options)
    assistant = network() if assistant is None else assistant
    return expected, model.generate(
        **inputs, **options, assistant_model=assistant, speculative_config=config, return_dict_in_generate=True
    )


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (RCSDConfig(steps=3, batching="lockstep", on_drafter_error="raise"), {}),
        (RCSDConfig(steps=3, batching="ragged", on_drafter_error="raise"), {"eos_token_id": 9}),
        (CONFIG, {"prefill_chunk_size": 3}),
        (CONFIG, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
        (RCSDConfig(drafting="hybrid", on_drafter_error="raise"), {}),
        (RCSDConfig(drafting="ngram"), {}),
        (RCSDConfig(length=2, on_drafter_error="raise"), {}),
        (SpeculativeConfig(on_drafter_error="raise"), {}),
    ],
    ids=["lockstep", "ragged", "chunked prefill", "processors", "hybrid", "ngram", "length", "general form"],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_options_leave_the_text_as_it_is(config, options, batch_size):
    expected, out = both(prompts(batch_size), config, pad_token_id=0, **options)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("pair", [attending_pair, recalling_pair])
def test_a_right_drafter_is_right_in_every_row_of_a_batch(pair):
    """Rows padded on the left, of different lengths: a wrong mask, position or feature would cost acceptance."""
    model, assistant = pair()
    ids = torch.tensor([[FIRST, 5, 9, 3, 22], [0, 0, FIRST, 4, 7], [0, FIRST, 30, 31, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    expected, out = both(inputs, RCSDConfig(steps=3, on_drafter_error="raise"), model, assistant, max_new_tokens=17)
    assert torch.equal(out.sequences, expected)
    assert out.speculative_stats.acceptance_rate == 1.0


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_continued_cache(chunk):
    """The tokens before are fed by nobody: the drafter begins where the features begin, and goes on as ever."""
    model, assistant = recalling_pair()
    first = torch.tensor([[FIRST, 5, 9, 3, 22, 8]])
    cache_of = model.generate(first, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([cache_of.sequences, torch.tensor([[11, 12, 13]])], 1)
    expected = model.generate(longer, max_new_tokens=13, do_sample=False)
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    out = model.generate(
        longer,
        max_new_tokens=13,
        do_sample=False,
        assistant_model=assistant,
        speculative_config=RCSDConfig(steps=2, on_drafter_error="raise"),
        return_dict_in_generate=True,
        **{CACHE_KEY: cache_of[CACHE_KEY]},
        **options,
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculative_stats.tokens_per_round == 3


def test_embedded_prompts():
    embeddings = target().get_input_embeddings()(prompts()["input_ids"]).detach()
    inputs = {"inputs_embeds": embeddings, "attention_mask": torch.ones(1, 7).long()}
    expected, out = both(inputs)
    assert torch.equal(out.sequences, expected)
    assert out.speculative_stats.num_draft_tokens > 0


def test_a_relaxed_rule_reads_the_networks_logits():
    out = target().generate(
        **prompts(),
        **OPTIONS,
        assistant_model=drafter_for(target(), "eagle3-reduced"),
        speculative_config=EASDConfig(entropy_threshold=0.1, overlap_threshold=0.9, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    assert not out.speculative_stats.lossless
    assert out.speculative_stats.num_draft_tokens > 0


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
def test_nothing_stays_behind_after_an_exception(call, error):
    calls = []

    def processor(ids, scores):
        calls.append(ids)
        if len(calls) > call:
            raise error
        return scores

    before, expected = state_of(target()), target().generate(**prompts(), **OPTIONS)
    with pytest.raises(error):
        target().generate(
            **prompts(), **OPTIONS, assistant_model=network(), speculative_config=CONFIG, logits_processor=[processor]
        )
    assert str(before) == str(state_of(target()))
    assert not any(module._forward_pre_hooks for module in target().modules())
    assert torch.equal(target().generate(**prompts(), **OPTIONS), expected)


def test_an_exception_inside_the_target_takes_the_hooks_away():
    tap = FeatureTap(target(), (2, 6))
    with pytest.raises(BrokenError), tap.capture():
        raise BrokenError
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target().modules())


def test_another_thread_is_not_listened_to():
    tap, seen = FeatureTap(target(), (2, 6)), []
    with torch.no_grad(), tap.capture() as captured:
        target()(torch.tensor([[3, 4, 5]]))

        def other():
            with torch.no_grad(), tap.capture() as theirs:
                target()(torch.tensor([[9, 9, 9, 9]]))
                seen.append(theirs.features)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        own = captured.features
    with torch.no_grad():
        for ids, features in ((torch.tensor([[3, 4, 5]]), own), (torch.tensor([[9, 9, 9, 9]]), seen[0])):
            states = target()(ids, output_hidden_states=True).hidden_states
            assert torch.equal(features, torch.cat([states[2], states[6]], -1))


def test_threads_share_a_target_and_a_drafter():
    inputs = [prompts(seed=seed) for seed in range(4)]
    expected = [target().generate(**each, **OPTIONS) for each in inputs]
    got = {}

    def decode(index):
        got[index] = target().generate(**inputs[index], **OPTIONS, assistant_model=network(), speculative_config=CONFIG)

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[index], expected[index]) for index in range(4))
    assert not any(module._forward_pre_hooks for module in target().modules())


def test_the_network_itself_is_not_changed():
    before = {name: value.clone() for name, value in network().state_dict().items()}
    config = network().config.to_dict()
    both(prompts(4))
    assert network().config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in network().state_dict().items())
    assert not any(parameter is each for each in target().parameters() for parameter in network().parameters())


def test_a_drafter_without_its_target():
    lone = drafter_for(target(), "eagle")
    lone._borrowed = None
    with pytest.raises(IncompatibleDraftError, match="attach"):
        lone(torch.tensor([[1, 2]]), torch.zeros(1, 2, 32))
    expected, out = both(prompts(), assistant=lone)  # generate attaches it
    assert torch.equal(out.sequences, expected)


def test_steps():
    assert RCSDConfig(steps=3).controller(deterministic=True).length == 3
    assert RCSDConfig.from_dict(RCSDConfig(steps=4).to_dict()) == RCSDConfig(steps=4)
    for options in ({"steps": 0}, {"steps": True}, {"tree": "large"}):
        with pytest.raises(InvalidConfigError):
            RCSDConfig(**options)


def test_a_target_whose_states_are_not_three_dimensional_is_refused():
    if "gemma3n" not in FAMILIES:
        pytest.skip("this transformers has no Gemma 3n")
    model = FAMILIES["gemma3n"].build()
    with pytest.raises(UnsupportedModelError, match="hidden states of shape"):
        model.generate(
            **prompts(),
            **OPTIONS,
            assistant_model=AutoDrafter.from_target(model),
            speculative_config=CONFIG,
        )


@pytest.mark.parametrize("tree", ["auto", TreeShape(depth=2, top_k=2, total_nodes=4)])
@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_a_network_whose_attention_takes_no_tree_is_refused_before_the_first_token(attention, tree):
    model, assistant = small_target(), drafter_for(target())
    assistant.attach(model)
    assistant.config._attn_implementation = attention
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    config = RCSDConfig(tree=tree)
    message = rf"sdpa.*Eagle3Drafter was loaded with {attention}: load it with attn_implementation=.sdpa.*tree=None"
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate(**prompts(), assistant_model=assistant, speculative_config=config, **OPTIONS)
    assert passes == []
    assistant.set_attn_implementation("eager")
    both(prompts(), RCSDConfig(tree=tree, on_drafter_error="raise"), model, assistant)
