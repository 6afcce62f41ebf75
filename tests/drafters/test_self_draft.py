"""Self-drafting: what runs when, what it refuses, and how it combines."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache

import hf_specdec
from hf_specdec import (
    ConstantLength,
    DraftVocabulary,
    EASDConfig,
    ExactConfig,
    ExitHeads,
    ExitHeadsConfig,
    GoodputLength,
    IncompatibleDraftError,
    InvalidConfigError,
    SelfDraftConfig,
    UnsupportedModelError,
    verify_lossless,
)
from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import ExitPolicy, SelfDrafter
from hf_specdec.layer_gate import LayerGate, find_layers
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.prepared_layers import PreparedLayers
from tests.drafters.self_drafting import Director, layer_calls
from tests.drafters.test_stock_loop import settings_of, with_drafter
from tests.toys import noisy_copy, prompts, state_of, tiny_llama


LAYERS, PROMPT, TOKENS = 6, 7, 18
EXITS = (1, 2, 4)
CONFIG = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.0, length=4, on_drafter_error="raise")


def wanders(row, column, depth):
    return (row + column) % 5 < depth


def sometimes(row, column):
    return (row + column) % 3 != 0


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=LAYERS)


def decode(model, batch_size=1, config=CONFIG, **options):
    return model.generate(
        **prompts(batch_size),
        do_sample=False,
        pad_token_id=0,
        **{"max_new_tokens": TOKENS, "return_dict_in_generate": True} | options,
        **({} if config is None else {"speculative_config": config}),
    )


def directed(model, batch_size=1, right=sometimes, leaves=wanders, **options):
    reference = decode(model, batch_size, None).sequences
    with Director(reference, right, leaves).directing():
        return decode(model, batch_size, **options)


# --- what runs when -------------------------------------------------------------------------------------------------


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
        kept = torch.isfinite(logits).all(0).nonzero()[:, 0]
        assert torch.equal(kept, wanted)
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


# --- combinations ---------------------------------------------------------------------------------------------------


def test_prompt_lookup_where_no_exit_is_confident(model):
    config = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=1.0, length=3, drafting="hybrid")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    reference = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    out = model.generate(
        ids,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        speculative_config=config,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, reference)
    assert out.speculative_stats.num_draft_tokens > 0
    assert out.speculative_stats.events["exit_depths"] == {}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_together_in_a_batch(model, batch_size):
    config = SelfDraftConfig(
        exit_layers=EXITS, confidence_threshold=0.0, length=3, drafting="hybrid", on_drafter_error="raise"
    )
    out = directed(model, batch_size, config=config)
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)


def test_other_rules_judge_self_drafts(model):
    heads = ExitHeads(ExitHeadsConfig(exit_layers=[3]))
    never = EASDConfig(overlap_threshold=2.0, length=3, on_drafter_error="raise")
    out = decode(model, config=never, assistant_model=heads)
    assert torch.equal(out.sequences, decode(model, config=None).sequences)
    easd = EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0, length=3, on_drafter_error="raise")
    for config, assistant in (
        (easd, ExitHeads(ExitHeadsConfig(exit_layers=[3]))),
        (SelfDraftConfig(exit_layers=[3], acceptance=easd.rule, length=3, confidence_threshold=0.0), None),
    ):
        stats = decode(model, config=config, assistant_model=assistant).speculative_stats
        assert not stats.lossless
        if stats.num_draft_tokens:
            assert "easd_fired" in stats.events


@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_untrained_heads_are_raw_and_can_be_saved(model, kind, tmp_path):
    heads = ExitHeads(ExitHeadsConfig(kind, EXITS, hidden_size=model.config.hidden_size))
    heads.save_pretrained(tmp_path)
    hidden = torch.randn(2, 3, model.config.hidden_size)
    for each in (heads, ExitHeads.from_pretrained(tmp_path)):
        assert all(torch.equal(each(hidden, layer=layer), hidden) for layer in EXITS)
    config = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise")
    from_file = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise", exit_heads=str(tmp_path))
    raw = decode(model, config=SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.05, length=4))
    by_path = decode(model, config=config, assistant_model=tmp_path)
    for out in (decode(model, config=config, assistant_model=heads), decode(model, config=from_file), by_path):
        assert torch.equal(out.sequences, raw.sequences)
        assert out.speculative_stats.events == raw.speculative_stats.events
        assert sum(out.speculative_stats.events["exit_depths"].values()) > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["linear", "adapter"])
def test_heads_that_change_what_they_are_given_do_not_change_the_text(model, kind, batch_size):
    """What a head makes of a hidden state is for its exit alone: the layers above go on from the hidden state itself."""
    heads = ExitHeads(ExitHeadsConfig(kind, EXITS, hidden_size=model.config.hidden_size))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    hidden = torch.randn(1, 1, model.config.hidden_size, generator=generator)
    assert not torch.allclose(heads(hidden, layer=EXITS[0]), hidden, atol=1e-2)
    config = SelfDraftConfig(confidence_threshold=0.05, length=4, on_drafter_error="raise")
    out = decode(model, batch_size, config, assistant_model=heads)
    assert out.speculative_stats.num_draft_tokens > 0
    assert torch.equal(out.sequences, decode(model, batch_size, None).sequences)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_verify_lossless_checks_it(model, batch_size):
    config = SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.0, length=3)
    report = verify_lossless(model, [[5, 6, 7], [9, 8, 7, 6]], config, max_new_tokens=8, batch_size=batch_size)
    assert report.equal
    assert all(comparison.num_draft_tokens > 0 for comparison in report.comparisons)


def test_custom_generate_needs_no_drafter(model):
    out = decode(model, custom_generate=hf_specdec.generate, batch_size=2)
    assert torch.equal(out.sequences, decode(model, 2, None).sequences)
    assert out.speculative_stats.num_draft_tokens > 0


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 5, 6, 7], [10]], ids=["words", "one token"])
@pytest.mark.parametrize("right", [lambda row, column: True, sometimes, lambda row, column: False])
def test_in_transformers_own_assisted_decoding(model, prompt, right):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    reference = model.generate(ids, **options)

    def make(config, processors):
        settings = settings_of(config, processors)
        return SelfDrafter.for_stock_loop(settings, twin, ExitPolicy(exit_layers=EXITS, confidence_threshold=0.0))

    twin, made = with_drafter(model, make)
    before, proposed, original = state_of(twin), [], SelfDrafter.propose

    def propose(drafter, context, budget):
        proposed.append(original(drafter, context, budget))
        return proposed[-1]

    with Director(reference, right, wanders).directing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfDrafter, "propose", propose)
        got = twin.generate(ids, assistant_model=twin, **options)
    assert torch.equal(got, reference)
    assert len(made) == 1
    assert sum(int(draft.lengths[0]) for draft in proposed) > 0
    assert state_of(twin)[4] == before[4], "no gate is left before a layer"


# --- options --------------------------------------------------------------------------------------------------------


def test_options_out_of_range():
    for options, name in (
        ({"exit_layers": []}, "exit_layers"),
        ({"exit_layers": [3, 2]}, "exit_layers"),
        ({"exit_layers": [0]}, "exit_layers"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"annealing": -1.0}, "annealing"),
        ({"max_width": 0}, "max_width"),
        ({"max_depth": 0}, "max_depth"),
        ({"min_cumulative_confidence": 2.0}, "min_cumulative_confidence"),
        ({"drafting": "ngram"}, "prompt lookup"),
        ({"acceptance": "nonsense"}, "nonsense"),
    ):
        with pytest.raises(InvalidConfigError, match=name):
            SelfDraftConfig(**options)


def test_what_does_not_fit_the_model_is_refused_before_the_first_token(model):
    tiny = tiny_llama(layers=2)
    for error, match, options in (
        (InvalidConfigError, "1..5", {"config": SelfDraftConfig(exit_layers=[6])}),
        (InvalidConfigError, "max_depth", {"config": SelfDraftConfig(exit_layers=[3], max_depth=2)}),
        (InvalidConfigError, "output_attentions", {"output_attentions": True}),
        (InvalidConfigError, "LlamaForCausalLM", {"assistant_model": tiny}),
        (InvalidConfigError, "need heads", {"assistant_model": ExitHeads(ExitHeadsConfig(exit_layers=[2]))}),
        (UnsupportedModelError, "StaticCache", {"cache_implementation": "static"}),
    ):
        with pytest.raises(error, match=match):
            decode(model, **options)
    narrow = ExitHeads(ExitHeadsConfig("linear", EXITS, hidden_size=8))
    with pytest.raises(IncompatibleDraftError, match="width 8"):
        decode(model, assistant_model=narrow)


def test_the_guard_is_the_goodput_controller():
    assert SelfDraftConfig().controller(deterministic=True) == GoodputLength(longest=6)
    assert SelfDraftConfig(max_width=3).controller(deterministic=False) == ConstantLength(3)


def test_a_config_survives_saving(tmp_path):
    config = SelfDraftConfig(exit_layers=[2, 4], annealing=0.25, max_width=3, acceptance=EASDConfig().rule)
    config.save_pretrained(tmp_path)
    assert SelfDraftConfig.from_pretrained(tmp_path) == config
    heads = SelfDraftConfig(exit_heads=tmp_path / "heads")
    assert heads.exit_heads == str(tmp_path / "heads")
    heads.save_pretrained(tmp_path)
    assert SelfDraftConfig.from_pretrained(tmp_path) == heads
    with pytest.raises(InvalidConfigError, match=r"got ExitHeads: pass heads in memory as assistant_model"):
        SelfDraftConfig(exit_heads=ExitHeads(ExitHeadsConfig(exit_layers=[2])))


def test_temperatures_anneal_and_confidences_look_at_the_law_alone():
    policy = ExitPolicy(annealing=0.5)
    assert policy.temperature(28, 28) == 1.0
    assert policy.temperature(7, 28) == pytest.approx(1.375)
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    assert policy.confidence(logits, 28, 28).item() == pytest.approx(logits.softmax(-1).max().item())
    assert policy.confidence(logits, 7, 28) < policy.confidence(logits, 14, 28)
    assert policy.exits_of(28) == (21,)
    assert ExitPolicy(exit_layers=(7, 14, 21), max_depth=16).exits_of(28) == (7, 14)


def test_noisy_weights_change_nothing_of_this():
    """Equality on other weights, with the real exits and nothing directed."""
    for seed in range(3):
        model = noisy_copy(tiny_llama(layers=LAYERS), seed=seed)
        for config in (CONFIG, SelfDraftConfig(exit_layers=EXITS, confidence_threshold=0.2)):
            assert torch.equal(decode(model, 3, config).sequences, decode(model, 3, None).sequences)


def test_heads_by_path_serve_any_config(model, tmp_path):
    ExitHeads(ExitHeadsConfig("linear", EXITS, hidden_size=model.config.hidden_size)).save_pretrained(tmp_path)
    never = EASDConfig(overlap_threshold=2.0, length=3, on_drafter_error="raise")
    for config in (never, ExactConfig(length=3, on_drafter_error="raise")):
        out = decode(model, config=config, assistant_model=str(tmp_path))
        assert torch.equal(out.sequences, decode(model, config=None).sequences)
        assert "exit_depths" in out.speculative_stats.events
    report = verify_lossless(model, [[5, 6, 7]], assistant_model=tmp_path, max_new_tokens=8)
    assert report.equal
    with pytest.raises(InvalidConfigError, match="pass one of them"):
        decode(model, config=SelfDraftConfig(exit_heads=tmp_path), assistant_model=tmp_path)
