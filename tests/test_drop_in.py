"""The doors: the hook on `generate`, the mixin, `custom_generate`, and how each says no."""

import json

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_specdec
from hf_specdec import (
    ConstantLength,
    EASDConfig,
    ExactConfig,
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
)
from tests.toys import prompts, tiny_llama
from tests.traps import EXACT, NGRAM, Counting, Log, Stops, drafter, letters, plain, speculative, target, text, tokens


EXPECTED = tokens(plain(prompts()))


@pytest.fixture
def unhooked():
    """Stock transformers, for the length of a test."""
    hf_specdec.uninstall()
    yield GenerationMixin.generate
    hf_specdec.install()


@pytest.fixture(params=["hooked", "unhooked"])
def either(request):
    """Both with and without the hook."""
    if request.param == "unhooked":
        request.getfixturevalue("unhooked")
    return request.param


class TestHook:
    def test_it_comes_and_goes(self):
        hooked = GenerationMixin.generate
        hf_specdec.install()
        assert GenerationMixin.generate is hooked
        hf_specdec.uninstall()
        original = GenerationMixin.generate
        assert original is not hooked
        assert original.__module__ == "transformers.generation.utils"
        hf_specdec.uninstall()
        assert GenerationMixin.generate is original
        hf_specdec.install()
        assert GenerationMixin.generate is not original
        assert GenerationMixin.generate.__wrapped__ is original

    def test_other_calls_reach_the_original_untouched(self, unhooked, monkeypatch):
        seen, answer = [], object()

        def original(self, *args, **kwargs):
            seen.append((self, args, kwargs))
            return answer

        monkeypatch.setattr(GenerationMixin, "generate", original)
        hf_specdec.install()
        ids, config, model = prompts()["input_ids"], GenerationConfig(), target()
        assert model.generate(ids, config, whatever=[1], custom_generate=None) is answer
        assert model.generate(ids, speculative_config=None, top_k=3) is answer
        assert [(each is model, args, kwargs) for each, args, kwargs in seen] == [
            (True, (ids, config), {"whatever": [1], "custom_generate": None}),
            (True, (ids,), {"top_k": 3}),
        ]
        assert seen[0][1][1] is config
        hf_specdec.uninstall()
        assert GenerationMixin.generate is original

    def test_without_it_the_keyword_is_unknown(self, unhooked):
        with pytest.raises(ValueError, match="speculative_config"):
            speculative("always", prompts())

    def test_positional_arguments(self):
        options = {"assistant_model": drafter("always"), "speculative_config": EXACT}
        config = GenerationConfig(max_new_tokens=16, pad_token_id=0)
        assert tokens(target().generate(prompts()["input_ids"], config, **options)) == EXPECTED
        started = target().generate(bos_token_id=3, max_new_tokens=5, pad_token_id=0, **options)
        assert started.equal(target().generate(bos_token_id=3, max_new_tokens=5, pad_token_id=0))

    def test_a_mixin_for_classes_of_ones_own(self, unhooked):
        class Own(SpeculativeGenerationMixin, LlamaForCausalLM):
            pass

        model, collected = Own(target().config).eval(), []
        model.load_state_dict(target().state_dict())
        assert tokens(plain(prompts(), model)) == EXPECTED
        output = speculative("sometimes", prompts(), model=model, stats_callback=collected.append)
        assert tokens(output) == EXPECTED
        assert collected[0].num_accepted_tokens > 0
        hf_specdec.install()
        assert tokens(speculative("sometimes", prompts(), model=model)) == EXPECTED


class TestWaysToSayIt:
    @pytest.fixture
    def saved(self, tmp_path):
        return NGRAM.save_pretrained(tmp_path / "config").parent

    def drafted(self, given, **options):
        """Runs with the config said in some way; the number of drafted tokens shows that it was understood."""
        collected = []
        output = speculative(None, prompts(), given, stats_callback=collected.append, max_new_tokens=24, **options)
        assert tokens(output) == tokens(plain(prompts(), max_new_tokens=24))
        return collected[0].num_draft_tokens

    def test_object_dictionary_folder_and_file(self, saved):
        drafted = self.drafted(NGRAM)
        assert drafted > 0
        for given in (
            NGRAM.to_dict(),
            {"drafting": "ngram", "length": 4},
            saved,
            str(saved),
            saved / "speculative_config.json",
        ):
            assert self.drafted(given) == drafted

    def test_preset_names(self):
        for name in ("exact", "speculative"):
            assert self.drafted(name) > 0
        assert speculative("sometimes", prompts(), "easd").shape == (1, 23)

    @pytest.mark.parametrize("reload", [False, True])
    @pytest.mark.parametrize("given", ["object", "dictionary", "path"])
    def test_on_a_generation_config(self, given, reload, saved, tmp_path):
        value = {"object": NGRAM, "dictionary": NGRAM.to_dict(), "path": str(saved)}[given]
        config = GenerationConfig(max_new_tokens=24, pad_token_id=0, speculative_config=value)
        if reload:
            config.save_pretrained(tmp_path)
            assert json.loads((tmp_path / "generation_config.json").read_text())["speculative_config"]
            config = GenerationConfig.from_pretrained(tmp_path)
        collected = []
        output = target().generate(**prompts(), generation_config=config, stats_callback=collected.append)
        assert tokens(output) == tokens(plain(prompts(), max_new_tokens=24))
        assert collected[0].num_draft_tokens == self.drafted(NGRAM)
        positional = target().generate(prompts()["input_ids"], config, stats_callback=collected.append)
        assert positional.equal(output)
        assert len(collected) == 2

    def test_a_checkpoint_does_not_switch_it_on(self, either):
        model, relaxed = tiny_llama(layers=2), EASDConfig(entropy_threshold=0.0, overlap_threshold=1.0)
        model.generation_config.speculative_config = relaxed
        assert tokens(plain(prompts(), model)) == EXPECTED
        options = {"custom_generate": hf_specdec.generate, "drafter": drafter("always")}
        assert tokens(plain(prompts(), model, **options)) == EXPECTED
        assert tokens(plain(prompts(), model, speculative_config=relaxed, **options)) != EXPECTED

    @pytest.mark.parametrize(
        "given", ["nonsense/of a name", 3, {"drafting": "oracle"}, {"preset": "Oracle"}, {"depth": 1}]
    )
    def test_what_is_no_config(self, given, monkeypatch):
        with pytest.raises((InvalidConfigError, OSError, ValueError)):
            speculative("always", prompts(), given)


class TestCustomGenerate:
    def call(self, inputs=None, **options):
        return plain(inputs or prompts(), custom_generate=hf_specdec.generate, **options)

    def test_its_own_keywords(self, either):
        tokenizer, shown, collected = letters(), Log(), []
        output = self.call(
            drafter=drafter("sometimes"),
            draft_tokenizer=tokenizer,
            text_tokenizer=tokenizer,
            token_streamer=shown,
            stats_callback=collected.append,
            speculative_config=EXACT,
        )
        assert tokens(output) == EXPECTED
        assert collected[0].num_accepted_tokens > 0
        assert not collected[0].events
        assert [put.tolist() for put in shown.puts] == [
            prompts()["input_ids"].tolist(),
            *([each] for each in text()[0]),
        ]
        assert shown.num_ends == 1

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_batches_and_output_objects(self, either, batch_size):
        inputs = prompts(batch_size)
        output = self.call(inputs, drafter=drafter("sometimes"), return_dict_in_generate=True, output_scores=True)
        assert tokens(output) == tokens(plain(inputs))
        assert len(output.scores) == 16
        assert len(output.speculative_stats.rows) == batch_size

    @pytest.mark.parametrize("options", [{}, {"speculative_config": "exact"}, {"drafter": None}])
    def test_without_a_drafter_the_error_names_the_keyword(self, either, options):
        with pytest.raises(InvalidConfigError, match="drafter="):
            self.call(**options)

    def test_what_transformers_withholds_is_not_ignored(self, unhooked):
        with pytest.raises(InvalidConfigError, match="drafter="):
            self.call(assistant_model=drafter("always"))

    def test_prompt_lookup_needs_no_drafter(self, either):
        assert tokens(self.call(speculative_config=NGRAM)) == EXPECTED

    def test_with_the_hook_the_usual_names_work_too(self):
        tokenizer = letters()
        options = {"stop_strings": [tokenizer.decode(text()[0][3:5])], "tokenizer": tokenizer}
        assert self.call(assistant_model=drafter("always"), **options).equal(plain(prompts(), **options))

    def test_a_length_of_transformers_own(self, either):
        collected = []
        options = {"speculative_config": SpeculativeConfig(drafting="model"), "stats_callback": collected.append}
        self.call(drafter=drafter("always"), num_assistant_tokens=2, **options)
        assert collected[0].num_rounds == 5
        with pytest.raises(InvalidConfigError, match="prompt_lookup_num_tokens"):
            self.call(drafter=drafter("always"), prompt_lookup_num_tokens=2)

    def test_the_end_comes_after_an_exception(self, either):
        shown = Log()
        with pytest.raises(ZeroDivisionError):
            self.call(drafter=drafter("always"), token_streamer=shown, logits_processor=[lambda ids, scores: 1 / 0])
        assert shown.num_ends == 1


class TestConflicts:
    @pytest.mark.parametrize("place", ["keyword", "generation_config"])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("assistant_confidence_threshold", 0.2),
            ("assistant_early_exit", 1),
            ("max_matching_ngram_size", 2),
            ("num_assistant_tokens_schedule", "heuristic"),
            ("prompt_lookup_num_tokens", 3),
            ("use_mtp", True),
        ],
    )
    def test_options_of_stock_assisted_decoding(self, name, value, place):
        options = {name: value}
        if place == "generation_config":
            config = GenerationConfig(max_new_tokens=4)
            setattr(config, name, value)
            options = {"generation_config": config, "max_new_tokens": None}
        with pytest.raises(InvalidConfigError, match=f"{name} .*speculative_config"):
            speculative("always", prompts(), **options)

    def test_defaults_of_the_checkpoint_give_way(self):
        model = tiny_llama(layers=2)
        model.generation_config.prompt_lookup_num_tokens = 3
        model.generation_config.num_assistant_tokens = 2
        assert tokens(speculative("sometimes", prompts(), model=model)) == EXPECTED
        config = SpeculativeConfig(drafting="model")
        output = speculative("always", prompts(), config, model=model, return_dict_in_generate=True)
        assert output.speculative_stats.num_rounds == 5  # (16 - 1) / (2 + 1)

    def test_two_names_for_one_thing(self):
        with pytest.raises(InvalidConfigError, match="assistant_model and drafter"):
            speculative("always", prompts(), drafter=drafter("always"))

    def test_two_decoding_loops(self):
        with pytest.raises(InvalidConfigError, match="speculative_config and custom_generate"):
            speculative("always", prompts(), custom_generate=lambda *args, **kwargs: None)

    def test_unknown_keywords_are_still_refused(self):
        with pytest.raises(ValueError, match="max_new_tokenz"):
            speculative("always", prompts(), max_new_tokenz=3)

    def test_own_stop_string_criteria_take_precedence(self):
        tokenizer, row = letters(), text()[0]
        own = StopStringCriteria(tokenizer=tokenizer, stop_strings=[tokenizer.decode(row[7])])
        options = {"stopping_criteria": [own], "stop_strings": [tokenizer.decode(row[2])], "tokenizer": tokenizer}
        assert tokens(speculative("always", prompts(), **options)) == tokens(plain(prompts(), **options))

    def test_stop_strings_without_a_tokenizer(self):
        with pytest.raises(InvalidConfigError, match="tokenizer="):
            speculative("always", prompts(), stop_strings=["a"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_beams": 2}, "beam search"),
            ({"num_beams": 2, "do_sample": True}, "beam sample"),
            ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
            ({"use_cache": False}, "use_cache=True"),
            ({"token_healing": True, "tokenizer": letters()}, "token_healing"),
            ({"cache_implementation": "paged"}, "continuous batching"),
            ({"config": SpeculativeConfig(drafting="model"), "accepted": None}, "assistant_model"),
            ({"config": EASDConfig(), "accepted": None}, "assistant_model"),
            ({"accepted": 3}, "assistant_model must be"),
        ],
    )
    def test_before_the_first_token(self, options, message):
        processor = Counting()
        given = {"accepted": "always", "inputs": prompts(), "logits_processor": [processor]} | options
        with pytest.raises((UnsupportedModelError, InvalidConfigError), match=message):
            speculative(**given)
        assert not processor.log

    def test_no_cache_in_the_models_own_config(self):
        model = tiny_llama(layers=2)
        model.generation_config.use_cache = False
        with pytest.raises(UnsupportedModelError, match="use_cache=True"):
            speculative("always", prompts(), model=model)

    @pytest.mark.parametrize("place", ["target", "assistant"])
    def test_encoder_decoders(self, place):
        shape = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
        options = {"accepted": "always", "model": model} if place == "target" else {"accepted": model}
        with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
            speculative(inputs={"input_ids": prompts()["input_ids"]}, **options)

    def test_ragged_batching_that_cannot_be(self):
        config = SpeculativeConfig(batching="ragged", drafting="model")
        for options in (
            {"logits_processor": [Counting()]},
            {"stopping_criteria": [Stops(lambda *_: False)]},
            {"max_time": 9.0},
        ):
            with pytest.raises(InvalidConfigError, match="batching"):
                speculative("always", prompts(3), config, **options)


@pytest.mark.parametrize("length", [0, 1, 2, 5, ConstantLength(3)])
def test_the_draft_length_is_kept(length):
    collected = []
    speculative("always", prompts(), ExactConfig(drafting="model", length=length), round_callback=collected.append)
    wanted = length if isinstance(length, int) else length.length
    assert {int(each.num_drafted) for each in collected[1:-1]} <= {wanted}
    assert all(torch.tensor(each.emitted).shape[1] <= wanted + 1 for each in collected)
