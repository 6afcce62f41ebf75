"""Self-drafting: what runs when."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache

from hf_specdec import (
    DraftVocabulary,
    SelfDraftConfig,
)
from hf_specdec._compat import CACHE_KEY
from hf_specdec.layer_gate import LayerGate, find_layers
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.prepared_layers import PreparedLayers
from tests.drafters.self_drafting import (
    CONFIG,
    EXITS,
    LAYERS,
    PROMPT,
    TOKENS,
    Director,
    decode,
    directed,
    layer_calls,
    sometimes,
    wanders,
)
from tests.toys import prompts, tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=LAYERS)


@pytest.mark.parametrize("right", [lambda row, column: True, sometimes, lambda row, column: False])
def test_each_token_passes_each_layer_once(model, right):
    reference = decode(model, config=None).sequences
    collected = []
    with Director(reference, right, wanders).directing(), layer_calls(model) as calls:
        out = decode(model, return_dict_in_generate=False, stats_callback=collected.append)
    assert torch.equal(out, reference)
    stats = collected[0]
    fed = PROMPT + stats.num_rounds + stats.num_draft_tokens  # a round feeds its newest token and its drafts
    assert [sum(tokens for layer, tokens in calls if layer == index) for index in range(LAYERS)] == [fed] * LAYERS


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_batches_pass_each_layer_once_too(model, batching):
    """Rows that have stopped included: a column of the batch is run anew for nobody."""
    endless = decode(model, 3, None).sequences
    eos = int(endless[0, PROMPT + 4])
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.0, length=4, on_drafter_error="raise", batching=batching
    )
    rounds = []
    with Director(endless, sometimes, wanders).directing(), layer_calls(model) as calls:
        out = decode(model, 3, config, eos_token_id=eos, return_dict_in_generate=False, round_callback=rounds.append)
    assert torch.equal(out, decode(model, 3, None, eos_token_id=eos).sequences)
    assert not all(bool(each.unfinished.all()) for each in rounds[:-1]), "a row stopped before the others"
    fed = PROMPT + sum(1 + int(each.num_drafted.max()) for each in rounds if not each.is_prefill)
    assert [sum(tokens for layer, tokens in calls if layer == index) for index in range(LAYERS)] == [fed] * LAYERS


def test_a_hard_token_costs_nothing_extra(model):
    """Where no token ever leaves, the layers run exactly as often and as wide as in plain decoding."""
    with layer_calls(model) as plain_calls:
        reference = decode(model, config=None).sequences
    with Director(reference, leaves=lambda *_: False).directing(), layer_calls(model) as calls:
        out = decode(model)
    assert calls == plain_calls
    assert out.speculative_stats.num_draft_tokens == 0
    assert out.speculative_stats.events["exit_depths"] == {}


def test_the_lower_layers_lead_and_every_layer_holds_what_it_has_run(model, monkeypatch):
    """Invariants A and B of the design, after every climb and before a round's last pass."""
    seen = []

    def checked(original):
        def call(lm, *args, **kwargs):
            result = original(lm, *args, **kwargs)
            check(lm.gate.window)
            return result

        return call

    def check(window):
        widths = [window.width_at(index) for index in range(LAYERS)]
        assert widths == sorted(widths, reverse=True)
        assert [layer.get_seq_length() for layer in window.cache.layers] == [window.columns + each for each in widths]
        seen.append(tuple(widths))

    monkeypatch.setattr(LayeredLM, "climb", checked(LayeredLM.climb))
    monkeypatch.setattr(LayeredLM, "_keep_what_fits", checked(LayeredLM._keep_what_fits))
    directed(model)
    assert any(len(set(widths)) > 2 for widths in seen), "tokens were deferred at different layers"


@pytest.mark.parametrize("pad", [3, 40])
def test_a_filler_is_not_kept_for_a_token_with_its_id(model, pad):
    """Filler beside a longer row has the position of the token before it: its keys are not those of a real token."""
    start, lengths = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), torch.tensor([4, 4])
    full = torch.cat([start, torch.tensor([[pad], [13]])], 1)
    lm = LayeredLM(
        model,
        LayerGate(model),
        pad_token_id=pad,
        cache=DynamicCache(config=model.config),
        held=torch.zeros(2, 0, dtype=torch.long),
    )
    with torch.no_grad(), lm.alone():
        lm.climb(start, lengths, 2)
        lm.climb(full, torch.tensor([4, 5]), 2)
        got = lm.run(full, torch.tensor([5, 5]), torch.tensor([1, 1])).logits
    with torch.no_grad():
        expected = model(full).logits[:, -1:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_stops(model):
    text = decode(model, config=None).sequences[0, PROMPT:].tolist()
    for at in (1, 2, 5):
        eos = text[at]
        reference = decode(model, config=None, eos_token_id=eos).sequences
        with Director(decode(model, config=None).sequences).directing():
            out = decode(model, eos_token_id=eos)
        assert torch.equal(out.sequences, reference)
    for number in (1, 2, 3):
        assert torch.equal(directed(model, max_new_tokens=number).sequences[0, PROMPT:], torch.tensor(text[:number]))


def test_the_width_bound(model):
    always = {"right": lambda row, column: True, "leaves": lambda row, column, depth: True}
    config = SelfDraftConfig(exit_layers=[2], max_width=2, length=5, confidence_threshold=0.0)
    stats = directed(model, config=config, **always).speculative_stats
    assert len(stats.drafted_at_position) == 2
    doubtful = SelfDraftConfig(
        exit_layers=[2], length=5, confidence_threshold=0.0, min_cumulative_confidence=1.0, annealing=0.0
    )
    # real confidences are below 1, so each row stops after the token that shows it
    assert len(decode(model, config=doubtful).speculative_stats.drafted_at_position) == 1


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_batches(model, batch_size, batching):
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.0, length=4, on_drafter_error="raise", batching=batching
    )
    for eos in (None, int(decode(model, batch_size, None).sequences[0, PROMPT + 4])):
        reference = decode(model, batch_size, None, eos_token_id=eos).sequences
        assert torch.equal(directed(model, batch_size, config=config, eos_token_id=eos).sequences, reference)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_recorded_outputs_are_those_of_plain_decoding(model, batch_size):
    eos = int(decode(model, batch_size, None).sequences[-1, PROMPT + 6])
    options = {"output_hidden_states": True, "output_scores": True, "output_logits": True, "eos_token_id": eos}
    plain, own = decode(model, batch_size, None, **options), directed(model, batch_size, **options)
    assert torch.equal(plain.sequences, own.sequences)
    for name in ("scores", "logits"):
        for expected, got in zip(getattr(plain, name), getattr(own, name), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for expected_step, step in zip(plain.hidden_states, own.hidden_states, strict=True):
        for expected, got in zip(expected_step, step, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_goes_on(model):
    cache = DynamicCache(config=model.config)
    first = directed(model, **{CACHE_KEY: cache, "max_new_tokens": 6}).sequences
    assert cache.get_seq_length() == first.shape[1] - 1
    longer = model.generate(
        first, speculative_config=CONFIG, max_new_tokens=6, do_sample=False, pad_token_id=0, **{CACHE_KEY: cache}
    )
    assert torch.equal(longer, decode(model, config=None, max_new_tokens=12).sequences)


def test_raw_exits_say_what_the_lower_layers_say(model, monkeypatch):
    """A model that ends after the exit layer drafts exactly what the exit drafts."""
    shallow = copy.deepcopy(model)
    shallow.model.layers = shallow.model.layers[:2]
    shallow.config.num_hidden_layers = 2
    config = SelfDraftConfig(exit_layers=[2], confidence_threshold=0.0, length=3)
    seen = []
    original = LayeredLM.climb

    def climb(lm, tokens, lengths, depth, *others):
        logits = original(lm, tokens, lengths, depth, *others)
        with torch.no_grad():
            expected = shallow(tokens[:, : int(lengths[0])]).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        seen.append(depth)
        return logits

    monkeypatch.setattr(LayeredLM, "climb", climb)
    out = decode(model, config=config)
    assert seen
    assert torch.equal(out.sequences, decode(model, config=None).sequences)


def test_accelerates_hooks_are_not_run_for_skipped_layers(model):
    hooked = copy.deepcopy(model)
    runs = []

    class Counting(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            runs.append(module)
            return super().pre_forward(module, *args, **kwargs)

    for layer in find_layers(hooked):
        add_hook_to_module(layer, Counting(execution_device="cpu"))
    before = [vars(layer)["forward"] for layer in find_layers(hooked)]
    reference = decode(model, config=None).sequences
    director = Director(reference, sometimes, wanders)
    with director.directing(), layer_calls(model) as calls:
        decode(model)
    with director.directing():
        out = decode(hooked)
    assert torch.equal(out.sequences, reference)
    assert len(runs) == len(calls) < LAYERS * TOKENS * len(EXITS)
    assert [vars(layer)["forward"] for layer in find_layers(hooked)] == before


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_draft_vocabulary_is_all_that_exits_score(model, batch_size, monkeypatch):
    vocabulary = DraftVocabulary(tuple(range(3, 30)), 64)
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.1, length=4, on_drafter_error="raise", draft_vocabulary=vocabulary
    )
    usable = {*vocabulary.token_ids, *prompts(batch_size)["input_ids"].unique().tolist()}
    wanted = torch.tensor(sorted(usable))
    original, seen = LayeredLM.climb, []

    def climb(lm, *args):
        logits = original(lm, *args)
        assert logits.shape == (batch_size, len(wanted))
        whole = lm.over_vocabulary(logits)
        assert whole.shape == (batch_size, model.config.vocab_size)
        assert torch.equal(torch.isfinite(whole).all(0).nonzero()[:, 0], wanted)
        assert torch.equal(lm.climb_ids[logits.argmax(-1)], whole.argmax(-1))
        seen.append(lm._ends is not None and lm.gate.window.width_at(0) > 1)
        return logits

    monkeypatch.setattr(LayeredLM, "climb", climb)
    out = decode(model, batch_size, config)
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)
    assert out.speculative_stats.num_draft_tokens > 0
    assert any(seen), "some climbs do without the model's own preparation"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_later_columns_climb_as_the_first_one_does(model, batch_size, monkeypatch):
    """Without the model's preparation the exits say what they say with it, and the model is called less often."""
    calls, said = [], []
    call, climb = LayeredLM._call_with_view, LayeredLM.climb

    def counted(lm, **inputs):
        calls[-1] += 1
        return call(lm, **inputs)

    def heard(lm, *args):
        said[-1].append(climb(lm, *args))
        return said[-1][-1]

    monkeypatch.setattr(LayeredLM, "_call_with_view", counted)
    monkeypatch.setattr(LayeredLM, "climb", heard)
    for prepares in (True, False):
        calls.append(0)
        said.append([])
        if not prepares:
            monkeypatch.setattr(PreparedLayers, "serves", lambda prepared, num_layers: False)
        decode(model, batch_size)
    assert calls[0] < calls[1]
    for one, other in zip(*said, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
