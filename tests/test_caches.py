"""Caches: continued without being fed again, left as plain decoding leaves them, or refused by name."""

import copy
import functools

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    QuantizedCache,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import QuantizedLayer, StaticLayer

from hf_specdec import InvalidConfigError, UnsupportedModelError
from hf_specdec._compat import CACHE_KEY
from tests.families import REFUSED
from tests.toys import noisy_copy, prompts, tiny_llama
from tests.traps import (
    ACCEPTED,
    EXACT,
    HYBRID,
    NGRAM,
    Counting,
    drafter,
    new_tokens,
    plain,
    speculative,
    target,
    tokens,
)


OUTPUT = {"return_dict_in_generate": True, "max_new_tokens": 10, "eos_token_id": None}
MORE = torch.tensor([[5, 9, 3]])


def sliding(window):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(
            MistralConfig(**shape, **heads, initializer_range=0.3, sliding_window=window, eos_token_id=None)
        ).eval()


MODELS = {"full": target(), "sliding 6": sliding(6), "sliding 20": sliding(20)}


def assistant_for(model, accepted):
    return {"always": model, "sometimes": noisy_copy(model), "never": drafter("never")}[accepted]


def full_mask(inputs, columns):
    mask = inputs["attention_mask"]
    return torch.cat([mask, torch.ones(len(mask), columns - mask.shape[1], dtype=torch.long)], 1)


def next_turn(output, inputs, only_new=False):
    """The inputs of a second turn: all ids, or those that the cache does not hold, with the mask of everything."""
    ids = torch.cat([output.sequences, MORE.expand(len(output.sequences), -1)], 1)
    mask = full_mask(inputs, ids.shape[1])
    return {"input_ids": ids[:, output[CACHE_KEY].get_seq_length() :] if only_new else ids, "attention_mask": mask}


def assert_same_cache(got, expected, inputs):
    """Equal keys and values in every layer, on the columns that are not prompt padding."""
    assert got.get_seq_length() == expected.get_seq_length()
    mask = full_mask(inputs, got.get_seq_length()).bool()
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        kept = mask[:, -ours.keys.shape[-2] :]
        for left, right in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(left.transpose(1, 2)[kept], right.transpose(1, 2)[kept], atol=1e-4, rtol=1e-4)
        assert not getattr(ours, "record_past", False)


class Forwards:
    """The lengths and first positions of a model's forward passes."""

    def __init__(self, model, monkeypatch):
        self.seen, forward = [], model.forward

        @functools.wraps(forward)
        def counted(input_ids=None, *args, **kwargs):
            self.seen.append((input_ids.shape[1], int(kwargs["position_ids"][0, 0])))
            return forward(input_ids, *args, **kwargs)

        monkeypatch.setattr(model, "forward", counted)


class TestTurns:
    """A pre-filled cache used to be fed the whole text a second time, at the wrong positions."""

    @pytest.mark.parametrize("accepted", ACCEPTED)
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("ends", [False, True])
    @pytest.mark.parametrize("name", ["full", "sliding 6"])
    def test_two_turns(self, name, ends, batch_size, accepted):
        model, inputs = MODELS[name], prompts(batch_size)
        assistant = assistant_for(model, accepted)
        eos = new_tokens(plain(inputs, model, **OUTPUT), inputs)[-1][6] if ends else None  # other rows go on
        options = OUTPUT | {"eos_token_id": eos}
        expected, got = plain(inputs, model, **options), speculative(assistant, inputs, model=model, **options)
        assert tokens(got) == tokens(expected)
        assert got[CACHE_KEY].get_seq_length() == got.sequences.shape[1] - 1
        assert_same_cache(got[CACHE_KEY], expected[CACHE_KEY], inputs)
        for only_new in (False, True):
            before, after = copy.deepcopy(expected[CACHE_KEY]), copy.deepcopy(got[CACHE_KEY])
            second = plain(next_turn(expected, inputs, only_new), model, cache=before, **OUTPUT)
            ours = speculative(assistant, next_turn(got, inputs, only_new), model=model, cache=after, **OUTPUT)
            assert tokens(ours) == tokens(second)
            assert ours[CACHE_KEY] is after
            assert_same_cache(ours[CACHE_KEY], second[CACHE_KEY], inputs)

    @pytest.mark.parametrize("method", [NGRAM, HYBRID])
    def test_two_turns_with_other_drafters(self, method):
        inputs, assistant = prompts(3), None if method is NGRAM else drafter("sometimes")
        expected, got = plain(inputs, **OUTPUT), speculative(assistant, inputs, method, **OUTPUT)
        assert_same_cache(got[CACHE_KEY], expected[CACHE_KEY], inputs)
        second = plain(next_turn(expected, inputs), cache=expected[CACHE_KEY], **OUTPUT)
        ours = speculative(assistant, next_turn(got, inputs), method, cache=got[CACHE_KEY], **OUTPUT)
        assert tokens(ours) == tokens(second)

    @pytest.mark.parametrize("only_new", [False, True])
    def test_only_new_tokens_are_fed(self, only_new, monkeypatch):
        inputs, model = prompts(), tiny_llama(layers=2)
        first = speculative("always", inputs, model=model, **OUTPUT)
        seen = Forwards(model, monkeypatch).seen
        held = first[CACHE_KEY].get_seq_length()
        speculative("always", next_turn(first, inputs, only_new), model=model, cache=first[CACHE_KEY], **OUTPUT)
        assert seen[0] == (1 + MORE.shape[1], held)
        assert seen[1] == (5, held + 4)

    @pytest.mark.skipif(CACHE_KEY == "past_key_values", reason="this release knows the older keyword only")
    def test_the_older_keyword(self):
        inputs = prompts()
        first = speculative("sometimes", inputs, **OUTPUT)
        turn = next_turn(first, inputs)
        expected = tokens(plain(turn, **OUTPUT))
        with pytest.warns(FutureWarning, match="past_key_values"):
            second = speculative("sometimes", turn, past_key_values=first[CACHE_KEY], **OUTPUT)
        assert tokens(second) == expected

    def test_stock_and_speculative_turns_alternate(self):
        inputs, cache = prompts(3), DynamicCache(config=target().config)
        first = speculative("sometimes", inputs, cache=cache, **OUTPUT)
        second = plain(next_turn(first, inputs), cache=cache, **OUTPUT)
        third = next_turn(second, inputs)
        assert tokens(speculative("always", third, cache=cache, **OUTPUT)) == tokens(plain(third, **OUTPUT))

    def test_a_cache_given_without_asking_for_an_output_object(self):
        inputs, ours, theirs = prompts(3), DynamicCache(), DynamicCache()
        options = {"max_new_tokens": 10, "eos_token_id": int(tokens(plain(prompts(3)))[1][9])}
        plain(inputs, cache=theirs, **options)
        speculative("sometimes", inputs, cache=ours, **options)
        assert_same_cache(ours, theirs, inputs)

    def test_the_recording_flag_is_put_back(self):
        model, inputs = MODELS["sliding 6"], prompts()
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        speculative(model, inputs, model=model, cache=cache, **OUTPUT)
        assert all(layer.record_past for layer in cache.layers)


@pytest.mark.parametrize("batch_size", [1, 3])
class TestPrompts:
    @pytest.mark.parametrize("method", [EXACT, NGRAM, HYBRID])
    @pytest.mark.parametrize("with_ids", [False, True])
    @pytest.mark.parametrize("name", ["full", "sliding 6"])
    def test_embedded_prompts(self, name, with_ids, method, batch_size):
        model, inputs = MODELS[name], prompts(batch_size)
        embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
        embedded |= inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
        for accepted in ACCEPTED:
            assistant = None if method is NGRAM else assistant_for(model, accepted)
            got, expected = (
                speculative(assistant, embedded, method, model=model, **OUTPUT),
                plain(embedded, model, **OUTPUT),
            )
            assert tokens(got) == tokens(expected)
            assert_same_cache(got[CACHE_KEY], expected[CACHE_KEY], inputs)

    @pytest.mark.parametrize("name", ["full", "sliding 6"])
    def test_embedded_prompts_without_a_mask(self, name, batch_size):
        model = MODELS[name]
        embedded = {"inputs_embeds": model.get_input_embeddings()(prompts(batch_size)["input_ids"]).detach()}
        for method, assistant in ((NGRAM, None), (EXACT, noisy_copy(model))):
            got = speculative(assistant, embedded, method, model=model, **OUTPUT)
            assert tokens(got) == tokens(plain(embedded, model, **OUTPUT))

    @pytest.mark.parametrize("chunk", [1, 3, 7, 8])
    @pytest.mark.parametrize("name", MODELS)
    def test_chunked_prefill(self, name, chunk, batch_size):
        model, inputs = MODELS[name], prompts(batch_size)
        options = OUTPUT | {"prefill_chunk_size": chunk}
        got = speculative(noisy_copy(model), inputs, model=model, **options)
        assert tokens(got) == tokens(plain(inputs, model, **options))

    def test_given_positions(self, batch_size):
        inputs = prompts(batch_size)
        inputs["position_ids"] = inputs["attention_mask"].cumsum(-1) + 3
        for accepted in ACCEPTED:
            assert tokens(speculative(accepted, inputs)) == tokens(plain(inputs))


class RoundingLayer(QuantizedLayer):
    """Takes the place of quanto's layer, which needs a package of its own."""

    def _quantize(self, tensor, axis):
        return tensor.half()

    def _dequantize(self, tensor):
        return tensor.float()


@pytest.fixture
def quantised(monkeypatch):
    """A quantised backend that needs no further package, and the name of its layers; transformers has one since 5.21."""
    if "Fp8QuantizedLayer" in vars(cache_utils):
        return "fp8", "Fp8QuantizedLayer"
    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", RoundingLayer)
    return "quanto", "RoundingLayer"


@pytest.mark.parametrize("batch_size", [1, 3])
class TestImplementations:
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_static(self, accepted, batch_size):
        inputs, options = prompts(batch_size), OUTPUT | {"cache_implementation": "static"}
        if not StaticLayer.is_croppable:  # up to transformers 5.23
            with pytest.raises(
                UnsupportedModelError, match=r"LlamaForCausalLM .*\(StaticLayer\).*with the default cache"
            ):
                speculative(accepted, inputs, model=tiny_llama(layers=2), **options)
            return
        got = speculative(accepted, inputs, model=tiny_llama(layers=2), **options)
        assert tokens(got) == tokens(plain(inputs, **OUTPUT))
        assert isinstance(got[CACHE_KEY], StaticCache)
        assert got[CACHE_KEY].get_seq_length() == got.sequences.shape[1] - 1

    def test_a_static_cache_of_the_user(self, batch_size):
        inputs, model = prompts(batch_size), tiny_llama(layers=2)
        cache = StaticCache(config=model.config, max_cache_len=40)
        if not StaticLayer.is_croppable:  # up to transformers 5.23
            with pytest.raises(
                UnsupportedModelError, match=r"LlamaForCausalLM .*\(StaticLayer\).*with the default cache"
            ):
                speculative("sometimes", inputs, cache=cache, model=model, **OUTPUT)
            assert cache.get_seq_length() == 0
            return
        first = speculative("sometimes", inputs, cache=cache, model=model, **OUTPUT)
        turn = next_turn(first, inputs)
        second = speculative("sometimes", turn, cache=cache, model=model, **OUTPUT)
        assert tokens(second) == tokens(plain(turn, **OUTPUT))

    def test_static_sliding_layers_are_refused(self, batch_size):
        model = MODELS["sliding 6"]
        with pytest.raises(UnsupportedModelError, match=r"MistralForCausalLM .*\(StaticSlidingWindowLayer\)"):
            speculative(model, prompts(batch_size), model=model, cache_implementation="static")

    def test_a_dynamic_cache_that_does_not_know_the_window(self, batch_size):
        model, inputs = MODELS["sliding 6"], prompts(batch_size)
        for accepted in ACCEPTED:
            got = speculative(assistant_for(model, accepted), inputs, model=model, cache=DynamicCache(), **OUTPUT)
            assert tokens(got) == tokens(plain(inputs, model, cache=DynamicCache(), **OUTPUT))

    def test_quantised_caches_are_refused_before_they_are_touched(self, batch_size, quantised):
        backend, layer = quantised
        cache, processor = QuantizedCache(backend, target().config), Counting()
        with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM .*\({layer}\).*with the default cache"):
            speculative("always", prompts(batch_size), cache=cache, logits_processor=[processor])
        options = {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
        with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM .*\({layer}\).*with the default cache"):
            speculative("always", prompts(batch_size), **options)
        assert cache.get_seq_length() == 0
        assert not processor.log

    def test_a_cache_of_a_recurrent_model_is_refused_and_left_empty(self, batch_size):
        model = REFUSED["qwen3_next"].build()
        cache = DynamicCache(config=model.config)
        with pytest.raises(UnsupportedModelError, match=type(model).__name__):
            speculative(model, prompts(batch_size), model=model, cache=cache)
        assert cache.get_seq_length() == 0

    def test_options_are_refused_before_the_cache_is_touched(self, batch_size):
        cache = DynamicCache()
        config = type(EXACT)(drafting="hybrid", on_drafter_error="raise")
        with pytest.raises(InvalidConfigError, match="assistant_model"):
            speculative(None, prompts(batch_size), config, cache=cache)
        assert cache.get_seq_length() == 0


def test_offloading_is_passed_on(monkeypatch):
    """Offloading needs an accelerator; here its streams do nothing and its layers stay where they are."""
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(DynamicCache, "prefetch", lambda *args, **kwargs: None)
    monkeypatch.setattr(DynamicCache, "offload", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *args: stream())
    monkeypatch.setattr(torch, "current_stream", lambda *args: stream(), raising=False)
    options = OUTPUT | {"cache_implementation": "offloaded"}
    got = speculative("sometimes", prompts(3), **options)
    assert tokens(got) == tokens(plain(prompts(3), **OUTPUT))
    assert got[CACHE_KEY].offloading


def test_the_cache_of_a_generation_config_is_not_shared():
    config = GenerationConfig(max_new_tokens=6, cache_implementation="dynamic", pad_token_id=0)
    inputs = prompts()
    for _ in range(2):
        output = target().generate(
            **inputs, generation_config=config, assistant_model=drafter("always"), speculative_config=EXACT
        )
        assert tokens(output) == tokens(plain(inputs, max_new_tokens=6))
