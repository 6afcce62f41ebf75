"""Nothing of the user's is changed: not by any way of decoding, and not when it ends with an exception at any call."""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import ConfidenceLength, DraftVocabulary, EASDConfig, ExactConfig, SelfDraftConfig, SpeculativeConfig
from hf_specdec._compat import CACHE_KEY
from tests.toys import noisy_copy, prompts, state_of, tiny_llama


TOKENS = 8
MODES = {
    "exact": ({"speculative_config": ExactConfig(on_drafter_error="raise")}, True),
    "easd": ({"speculative_config": EASDConfig(entropy_threshold=0.5, on_drafter_error="raise")}, True),
    "ngram": ({"speculative_config": SpeculativeConfig(drafting="ngram")}, False),
    "confidence": ({"speculative_config": SpeculativeConfig(length=ConfidenceLength(), drafting="model")}, True),
    "lockstep": ({"speculative_config": SpeculativeConfig(batching="lockstep", length=3)}, True),
    "sampled": ({"speculative_config": "exact", "do_sample": True, "top_k": 5}, True),
    "outputs": (
        {
            "speculative_config": "exact",
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_hidden_states": True,
        },
        True,
    ),
}


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


class Snapshot:
    """The states of both models, the hook, and what the user passed, before and after."""

    def __init__(self, *models):
        self.models = models
        self.before = [state_of(model) for model in models]
        self.hook = GenerationMixin.generate

    def check(self):
        for model, before in zip(self.models, self.before, strict=True):
            for part, now, then in zip(
                ("config", "generation config", "weights", "hooks", "attributes"), state_of(model), before, strict=True
            ):
                assert same(now, then), part
        assert GenerationMixin.generate is self.hook


def decode(model, batch_size=1, **options):
    return model.generate(
        **prompts(batch_size), **{"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0} | options
    )


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_no_way_of_decoding_leaves_a_trace(mode, batch_size):
    model, draft = tiny_llama(), noisy_copy(tiny_llama())
    options, needs_draft = MODES[mode]
    plain = decode(model, batch_size)
    # transformers installs hooks of its own for good when hidden states are asked for the first time
    decode(model, batch_size, **{key: value for key, value in options.items() if key != "speculative_config"})
    snapshot, given = Snapshot(model, draft), copy.deepcopy(options)
    decode(model, batch_size, **options, **({"assistant_model": draft} if needs_draft else {}))
    snapshot.check()
    assert options == given
    assert torch.equal(decode(model, batch_size), plain)


def test_greedy_decoding_leaves_the_random_state():
    model = tiny_llama()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for config in ("exact", EASDConfig(entropy_threshold=0.5)):
        decode(model, assistant_model=noisy_copy(model), speculative_config=config)
    assert torch.equal(torch.get_rng_state(), before)


class BombError(Exception):
    """What goes off in these tests."""


class Fuse:
    """Raises at the `at`-th call, and counts the calls."""

    def __init__(self, at, error):
        self.at, self.error, self.calls = at, error, 0

    def burn(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class FusedProcessor(LogitsProcessor):
    def __init__(self, fuse):
        self.fuse = fuse

    def __call__(self, input_ids, scores):
        self.fuse.burn()
        return scores


class FusedCriterion(StoppingCriteria):
    def __init__(self, fuse):
        self.fuse = fuse

    def __call__(self, input_ids, scores, **kwargs):
        self.fuse.burn()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FusedStreamer(BaseStreamer):
    def __init__(self, fuse):
        self.fuse, self.ends = fuse, 0

    def put(self, value):
        self.fuse.burn()

    def end(self):
        self.ends += 1


class FusedForward:
    """Counts a model's forward passes through a class-level wrapper, so that the instance stays as it is."""

    def __init__(self, model, fuse, monkeypatch):
        original = type(model).forward

        def forward(each, *args, **kwargs):
            if each is model:
                fuse.burn()
            return original(each, *args, **kwargs)

        forward.__wrapped__ = original
        monkeypatch.setattr(type(model), "forward", forward)


PLACES = ["target", "draft", "processor", "criterion", "streamer"]


def exploding(place, fuse, model, draft, monkeypatch):
    """The options of a call that blows up in one place."""
    options = {"assistant_model": draft, "speculative_config": SpeculativeConfig(drafting="model", length=3)}
    if place in ("target", "draft"):
        FusedForward(model if place == "target" else draft, fuse, monkeypatch)
    elif place == "processor":
        options["logits_processor"] = [FusedProcessor(fuse)]
    elif place == "criterion":
        options["stopping_criteria"] = [FusedCriterion(fuse)]
    else:
        options["streamer"] = FusedStreamer(fuse)
    return options


def number_of_calls(place, model, draft):
    fuse = Fuse(0, None)
    with pytest.MonkeyPatch.context() as patch:
        decode(model, **exploding(place, fuse, model, draft, patch))
    return fuse.calls


@pytest.mark.parametrize("error", [BombError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_at_any_call_leaves_everything_as_it_was(place, error):
    model, draft = tiny_llama(), noisy_copy(tiny_llama())
    plain, snapshot = decode(model), Snapshot(model, draft)
    calls = number_of_calls(place, model, draft)
    assert calls >= 3
    for at in range(1, calls + 1):
        fuse = Fuse(at, error())
        with pytest.MonkeyPatch.context() as patch:
            options = exploding(place, fuse, model, draft, patch)
            if place == "draft" and error is BombError:  # a failing drafter is no reason to lose the text
                assert torch.equal(decode(model, **options), plain)
            else:
                with pytest.raises(error):
                    decode(model, **options)
                assert fuse.calls == at
        if place == "streamer":
            assert options["streamer"].ends == 1
        snapshot.check()
    assert torch.equal(decode(model), plain)
    assert torch.equal(decode(model, assistant_model=draft, speculative_config="exact"), plain)


@pytest.mark.parametrize("place", ["target", "criterion"])
def test_a_users_cache_can_be_gone_on_with_after_an_exception(place):
    """What was committed stays in the cache; what was only drafted does not."""
    model, draft = tiny_llama(), noisy_copy(tiny_llama())
    for at in (2, 3):
        cache, fuse = DynamicCache(config=model.config), Fuse(at, BombError())
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BombError):
            decode(model, **{CACHE_KEY: cache}, **exploding(place, fuse, model, draft, patch))
        length = cache.get_seq_length()
        text = decode(model)
        assert 7 <= length <= text.shape[1]
        with torch.no_grad():
            reference = model(text[:, :length], use_cache=True)[CACHE_KEY]
        for layer, expected in zip(cache.layers, reference.layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)


def test_a_smaller_head_that_cannot_be_made_leaves_a_users_cache_untouched(monkeypatch):
    def explode(*_):
        raise BombError

    monkeypatch.setattr("hf_specdec.drafting.reduced_twins", lambda *_: explode)
    model = tiny_llama()
    snapshot, cache = Snapshot(model), DynamicCache(config=model.config)
    config = SelfDraftConfig(
        exit_layers=(1,), draft_vocabulary=DraftVocabulary(tuple(range(32)), 64), on_drafter_error="raise"
    )
    with pytest.raises(BombError):
        decode(model, speculative_config=config, **{CACHE_KEY: cache})
    assert cache.get_seq_length() == 0
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    snapshot.check()


def test_the_hook_comes_and_goes():
    hooked = GenerationMixin.generate
    hf_specdec.install()
    assert GenerationMixin.generate is hooked
    hf_specdec.uninstall()
    original = GenerationMixin.generate
    assert original is not hooked
    hf_specdec.uninstall()
    assert GenerationMixin.generate is original
    hf_specdec.install()
    assert GenerationMixin.generate is not original
