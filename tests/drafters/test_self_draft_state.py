"""Self-drafting leaves nothing behind, however it ends, and does not disturb another thread."""

import threading

import pytest
import torch
from transformers import DynamicCache

from hf_specdec import SelfDraftConfig, UnsupportedModelError, layer_gate
from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import SelfDrafter
from hf_specdec.layer_gate import LayerGate
from tests.test_state import (
    BombError,
    Fuse,
    FusedCriterion,
    FusedForward,
    FusedProcessor,
    FusedStreamer,
    Snapshot,
    decode,
)
from tests.toys import state_of, tiny_llama


CONFIG = SelfDraftConfig(exit_layers=[1, 2], confidence_threshold=0.1, length=3)
PLACES = ["target", "layer", "drafter", "processor", "criterion", "streamer"]


def exploding(place, fuse, model, monkeypatch):
    """The options of a call that blows up in one place."""
    if place == "processor":
        return {"logits_processor": [FusedProcessor(fuse)]}
    if place == "criterion":
        return {"stopping_criteria": [FusedCriterion(fuse)]}
    if place == "streamer":
        return {"streamer": FusedStreamer(fuse)}
    if place == "drafter":
        original = SelfDrafter.propose

        def propose(drafter, context, budget):
            fuse.burn()
            return original(drafter, context, budget)

        monkeypatch.setattr(SelfDrafter, "propose", propose)
    else:  # a layer's MLP blows up when its attention has already stored keys and values
        FusedForward(model if place == "target" else model.model.layers[1].mlp, fuse, monkeypatch)
    return {}


def number_of_calls(place, model):
    fuse = Fuse(0, None)
    with pytest.MonkeyPatch.context() as patch:
        decode(model, speculative_config=CONFIG, **exploding(place, fuse, model, patch))
    return fuse.calls


@pytest.mark.parametrize("error", [BombError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_at_any_call_leaves_everything_as_it_was(place, error):
    model = tiny_llama(layers=3)
    plain, snapshot = decode(model), Snapshot(model)
    calls = number_of_calls(place, model)
    assert calls >= 3
    for at in range(1, calls + 1):
        fuse = Fuse(at, error())
        with pytest.MonkeyPatch.context() as patch:
            options = exploding(place, fuse, model, patch)
            try:
                # a failing draft is no reason to lose the text; a failing target is
                assert torch.equal(decode(model, speculative_config=CONFIG, **options), plain)
                survived = True
            except error:
                survived = False
            # What fails within a draft may be survived, an interruption never, and nothing may be swallowed elsewhere.
            if survived:
                assert error is BombError
                assert place in ("target", "layer", "drafter")
            else:
                assert place != "drafter" or error is KeyboardInterrupt
            assert fuse.calls >= at
        snapshot.check()
    assert torch.equal(decode(model), plain)
    assert torch.equal(decode(model, speculative_config=CONFIG), plain)


@pytest.mark.parametrize("place", ["layer", "criterion"])
def test_a_users_cache_can_be_gone_on_with_after_an_exception(place):
    model = tiny_llama(layers=3)
    text = decode(model)
    for at in range(2, number_of_calls(place, model) + 1):
        cache, fuse = DynamicCache(config=model.config), Fuse(at, KeyboardInterrupt())
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            decode(model, speculative_config=CONFIG, **{CACHE_KEY: cache}, **exploding(place, fuse, model, patch))
        length = cache.get_seq_length()
        assert 7 <= length <= text.shape[1]
        with torch.no_grad():
            reference = model(text[:, :length], use_cache=True)[CACHE_KEY]
        for layer, expected in zip(cache.layers, reference.layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)


class Interleaved(FusedProcessor):
    """Lets another thread decode in the middle of this one's run."""

    def __init__(self, other):
        self.other, self.results, self.calls = other, [], 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls in (2, 4):
            thread = threading.Thread(target=lambda: self.results.append(self.other()))
            thread.start()
            thread.join()
        return scores


def outcome(call):
    try:
        return call()
    except UnsupportedModelError as error:
        return error


def test_a_plain_thread_is_not_disturbed():
    model = tiny_llama(layers=3)
    plain = decode(model)
    processor = Interleaved(lambda: decode(model))
    assert torch.equal(decode(model, speculative_config=CONFIG, logits_processor=[processor]), plain)
    assert len(processor.results) == 2
    assert all(torch.equal(each, plain) for each in processor.results)


def test_threads_that_really_overlap():
    model = tiny_llama(layers=3)
    plain, results = decode(model), {"plain": [], "self": []}

    def run(name, options):
        for _ in range(6):
            results[name].append(decode(model, **options))

    threads = [
        threading.Thread(target=run, args=("plain", {})),
        threading.Thread(target=run, args=("self", {"speculative_config": CONFIG})),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results["plain"]) == len(results["self"]) == 6
    assert all(torch.equal(each, plain) for texts in results.values() for each in texts)


def test_a_plain_pass_of_another_thread_in_the_middle_of_a_gated_one(monkeypatch):
    """The hardest moment: the gate is open, some layers have run."""
    model = tiny_llama(layers=3)
    plain, results, original = decode(model), [], type(model.model.layers[1].mlp).forward
    owner = threading.get_ident()

    def forward(mlp, hidden):
        if mlp is model.model.layers[1].mlp and threading.get_ident() == owner and len(results) < 4:
            thread = threading.Thread(target=lambda: results.append(decode(model)))
            thread.start()
            thread.join()
        return original(mlp, hidden)

    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", forward)
    assert torch.equal(decode(model, speculative_config=CONFIG), plain)
    assert len(results) == 4
    assert all(torch.equal(each, plain) for each in results)


def test_a_second_self_drafting_thread_is_refused_clearly():
    model = tiny_llama(layers=3)
    plain, snapshot = decode(model), Snapshot(model)
    processor = Interleaved(lambda: outcome(lambda: decode(model, speculative_config=CONFIG)))
    assert torch.equal(decode(model, speculative_config=CONFIG, logits_processor=[processor]), plain)
    assert all(isinstance(each, UnsupportedModelError) for each in processor.results)
    assert "another call" in str(processor.results[0])
    snapshot.check()
    assert torch.equal(decode(model, speculative_config=CONFIG), plain)


def test_a_gate_that_is_interrupted_between_two_layers_is_taken_away(monkeypatch):
    model, made = tiny_llama(), []
    model.model.layers[1].forward = own = model.model.layers[1].forward
    before = state_of(model)[4]
    gate, cache = LayerGate(model), DynamicCache(config=model.config)
    decode(model, **{CACHE_KEY: cache})

    class Interrupted(layer_gate._GatedForward):
        def __init__(self, *args):
            made.append(args)
            if len(made) == 3:
                raise KeyboardInterrupt
            super().__init__(*args)

    with monkeypatch.context() as patch:
        patch.setattr(layer_gate, "_GatedForward", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.install(cache)
    assert state_of(model)[4] == before
    assert vars(model.model.layers[1])["forward"] is own
    gate.remove()
    gate.install(cache)
    assert all(isinstance(vars(layer)["forward"], layer_gate._GatedForward) for layer in gate.layers)
    gate.remove()
    assert state_of(model)[4] == before
