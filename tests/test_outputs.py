"""What `generate` returns and shows, and where it stops: outputs, streams, criteria, statistics, pipelines."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer, pipeline
from transformers.generation import stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec import EASDConfig, InvalidConfigError, SpeculativeConfig, SpeculativeDecoderOnlyOutput, SpeculativeStats
from hf_specdec._compat import CACHE_KEY
from tests.toys import prompts
from tests.traps import (
    ACCEPTED,
    EXACT,
    HYBRID,
    NGRAM,
    Counting,
    Log,
    Stops,
    drafter,
    letters,
    new_tokens,
    plain,
    speculative,
    target,
    text,
    tokens,
)


EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "max_new_tokens": 10,
}


METHODS = {"model": (EXACT, "always"), "ngram": (NGRAM, None), "hybrid": (HYBRID, "sometimes")}


class InPlace(Counting):
    """Bans a token in the very tensor it is given, as careless processors do."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % 64] = float("-inf")
        return scores


def assert_close(got, expected):
    """Nested tuples of tensors: the same lengths, shapes and values."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        return
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs)


class TestPerTokenOutputs:
    """F11: one entry per new token, also after an EOS or a length cut."""

    @pytest.mark.parametrize("eos_at", [None, 2, 5])
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_equal_plain_decoding(self, accepted, batch_size, eos_at):
        inputs, model = prompts(batch_size), target("eager")
        rows = new_tokens(plain(inputs, model), inputs)
        options = EVERYTHING | {"eos_token_id": None if eos_at is None else [row[eos_at] for row in rows]}
        expected = plain(inputs, model, **options)
        got = speculative(drafter(accepted, "eager"), inputs, model=model, **options)
        assert tokens(got) == tokens(expected)
        for name in ("scores", "logits", "hidden_states", "attentions"):
            assert len(getattr(got, name)) == got.sequences.shape[1] - inputs["input_ids"].shape[1]
            assert_close(getattr(got, name), getattr(expected, name))

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize(
        "options",
        [{"repetition_penalty": 1.5}, {"logits_processor": [InPlace()]}, {"suppress_tokens": [text()[0][0]]}],
        ids=["penalty", "in place", "suppress"],
    )
    def test_scores_and_logits_with_processors(self, options, batch_size):
        inputs = prompts(batch_size)
        options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True} | options
        expected, got = plain(inputs, **options), speculative("sometimes", inputs, **options)
        assert tokens(got) == tokens(expected)
        assert_close(got.scores, expected.scores)
        assert_close(got.logits, expected.logits)

    def test_chunked_prefill(self):
        inputs, model = prompts(), target("eager")
        options = EVERYTHING | {"prefill_chunk_size": 3}
        got = speculative(drafter("sometimes", "eager"), inputs, model=model, **options)
        assert_close(got.hidden_states, plain(inputs, model, **options).hidden_states)

    def test_prompt_lookup(self):
        inputs, model = prompts(3), target("eager")
        expected = plain(inputs, model, **EVERYTHING)
        got = speculative(None, inputs, NGRAM, model=model, **EVERYTHING)
        assert_close(got.hidden_states, expected.hidden_states)
        assert_close(got.attentions, expected.attentions)

    def test_the_type_of_the_output(self):
        got = speculative("sometimes", prompts(), return_dict_in_generate=True)
        assert isinstance(got, SpeculativeDecoderOnlyOutput)
        assert isinstance(got, GenerateDecoderOnlyOutput)
        assert isinstance(got.speculative_stats, SpeculativeStats)
        assert (got.scores, got.logits, got.hidden_states, got.attentions) == (None,) * 4
        assert list(got) == ["sequences", CACHE_KEY, "speculative_stats"]
        assert isinstance(speculative("sometimes", prompts()), torch.Tensor)

    def test_outputs_that_were_not_asked_for_as_an_object(self):
        assert isinstance(speculative("sometimes", prompts(), output_scores=True), torch.Tensor)

    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_several_sequences_per_prompt(self, accepted):
        inputs = prompts(2)
        got = speculative(
            accepted, inputs, do_sample=True, num_return_sequences=3, top_k=0, return_dict_in_generate=True
        )
        assert got.sequences.shape[0] == 6
        assert len(got.speculative_stats.rows) == 6
        prompt_columns = inputs["input_ids"].shape[1]
        assert got.sequences[:, :prompt_columns].equal(inputs["input_ids"].repeat_interleave(3, 0))
        assert len({tuple(row) for row in new_tokens(got, inputs)}) > 4
        greedy = speculative(accepted, inputs, do_sample=True, num_return_sequences=3, top_k=1)
        assert greedy.equal(plain(inputs).repeat_interleave(3, 0))


def failing(number):
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise RuntimeError("on purpose")

    return fail


class TestStreamers:
    """B7: streamers get blocks, or tokens that are cut off later, or are never ended."""

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_one_token_per_put(self, method, batch_size):
        config, assistant = {"model": (EXACT, "always"), "ngram": (NGRAM, None), "hybrid": (HYBRID, "sometimes")}[
            method
        ]
        inputs, options = prompts(batch_size), {"eos_token_id": text(batch_size)[0][6]}
        expected, got = Log(), Log()
        reference = plain(inputs, streamer=expected, **options)
        output = speculative(assistant, inputs, config, streamer=got, **options)
        assert tokens(output) == tokens(reference)
        assert [put.tolist() for put in got.puts] == [put.tolist() for put in expected.puts]
        assert got.puts[0].equal(inputs["input_ids"])
        assert {tuple(put.shape) for put in got.puts[1:]} == {(batch_size,)}
        assert got.num_ends == 1

    def test_text_streamer(self, capsys):
        tokenizer = letters()
        plain(prompts(), streamer=TextStreamer(tokenizer))
        expected = capsys.readouterr().out
        speculative("sometimes", prompts(), streamer=TextStreamer(tokenizer))
        assert capsys.readouterr().out == expected
        assert tokenizer.decode(text()[0]) in expected

    def test_text_iterator_streamer(self):
        tokenizer, collected = letters(), []
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=lambda: collected.append(speculative("always", prompts(), streamer=streamer)))
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        assert streamed == tokenizer.decode(text()[0])
        assert tokens(collected[0]) == tokens(plain(prompts()))

    @pytest.mark.parametrize(
        "broken",
        [
            {"logits_processor": [lambda ids, scores: failing(1)(ids)]},
            {"stopping_criteria": [Stops(failing(1))]},
            {"accepted": lambda settings: failing(1)(settings)},
            {"not_an_option": 1},
            {"num_beams": 2},
            {"stats_callback": failing(1)},
            {"round_callback": failing(2)},
            {"use_cache": False},
            {"prompt_lookup_num_tokens": 3},
        ],
        ids=lambda broken: next(iter(broken)),
    )
    def test_the_end_comes_once_after_an_exception(self, broken):
        log = Log()
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            speculative(**({"accepted": "always", "inputs": prompts(), "streamer": log} | broken))
        assert log.num_ends == 1

    @pytest.mark.parametrize("index", [0, 1, 2, 5])
    def test_the_end_comes_once_after_a_failing_put(self, index):
        log = Log(fails_at=index)
        with pytest.raises(RuntimeError, match="streamer"):
            speculative("always", prompts(), streamer=log)
        assert log.num_ends == 1
        assert [put.tolist() for put in log.puts[1:]] == [[token] for token in text()[0][: max(0, index - 1)]]

    def test_what_stops_a_text_is_the_last_thing_shown(self):
        tokenizer, log = letters(), Log()
        options = {"stop_strings": [tokenizer.decode(text()[0][2:4])], "tokenizer": tokenizer}
        output = speculative("always", prompts(), streamer=log, **options)
        assert torch.cat([log.puts[0][0], *log.puts[1:]]).tolist() == tokens(output)[0]
        assert tokens(output) == tokens(plain(prompts(), **options))


class TestStoppingCriteria:
    """A3: stop strings and custom criteria raise, or are missed in the middle of a block."""

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("start", range(14))
    def test_every_window_as_stop_string(self, start, size):
        tokenizer = letters()
        options = {"stop_strings": [tokenizer.decode(text()[0][start : start + size])], "tokenizer": tokenizer}
        expected = tokens(plain(prompts(), **options))
        for accepted in ("always", "sometimes"):
            assert tokens(speculative(accepted, prompts(), **options)) == expected
        assert len(expected[0]) <= 7 + start + size

    @pytest.mark.parametrize("method", METHODS)
    def test_stop_strings_in_a_batch(self, method):
        inputs, tokenizer = prompts(4), letters()
        options = {"stop_strings": [tokenizer.decode(row[i : i + 2]) for i, row in enumerate(text(4))][1:]}
        options |= {"tokenizer": tokenizer, "eos_token_id": 63}
        config, assistant = METHODS[method]
        output = speculative(assistant, inputs, config, **options)
        assert tokens(output) == tokens(plain(inputs, **options))

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("token", sorted(set(text()[0]))[::2])
    @pytest.mark.parametrize("whole", [False, True])
    def test_custom_criteria(self, token, whole, batch_size):
        def condition(row, scores):
            return token in row[7:] if whole else row[-1] == token

        expected, got = Stops(condition), Stops(condition)
        reference = plain(prompts(batch_size), stopping_criteria=[expected], eos_token_id=None)
        output = speculative("always", prompts(batch_size), stopping_criteria=[got], eos_token_id=None)
        assert tokens(output) == tokens(reference)
        assert got.log == expected.log

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_criteria_that_read_scores(self, accepted, batch_size):
        outputs = {"return_dict_in_generate": True, "output_scores": True}
        peaks = [float(s[0].max()) for s in plain(prompts(batch_size), **outputs).scores]
        expected, got = (Stops(lambda row, scores: float(scores[-1][0].max()) >= max(peaks[2:]) - 1e-4) for _ in "ab")
        reference = plain(prompts(batch_size), stopping_criteria=[expected], **outputs)
        output = speculative(accepted, prompts(batch_size), stopping_criteria=[got], **outputs)
        assert tokens(output) == tokens(reference)
        assert got.log == expected.log
        assert len(expected.log) < 16 or peaks[-1] == max(peaks)

    @pytest.mark.parametrize("batch_size", [1, 4])
    @pytest.mark.parametrize("num_calls", [1, 5, 9])
    def test_criteria_that_count(self, num_calls, batch_size):
        expected, got = Stops(None), Stops(None)
        for criterion in (expected, got):
            criterion.condition = lambda row, scores, log=criterion.log: len(log) >= num_calls
        reference = plain(prompts(batch_size), stopping_criteria=[expected])
        output = speculative("always", prompts(batch_size), stopping_criteria=[got])
        assert tokens(output) == tokens(reference)
        assert got.log == expected.log


class Clock:
    """Advances by one second each time it is asked."""

    def __init__(self):
        self.seconds = 0

    def __call__(self):
        self.seconds += 1
        return self.seconds


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("accepted", ACCEPTED)
def test_max_time_is_asked_after_every_token(accepted, batch_size, monkeypatch):
    """Unequal rows would be padded although nothing ended them."""
    texts = []
    for run in (plain, lambda inputs, **options: speculative(accepted, inputs, **options)):
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=Clock()))
        texts.append(tokens(run(prompts(batch_size), max_time=6.5, eos_token_id=1)))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 14


def test_statistics_for_callers_that_get_only_tensors():
    collected = []
    output = speculative("sometimes", prompts(2), stats_callback=collected.append)
    assert isinstance(output, torch.Tensor)
    assert collected[0].num_new_tokens == 32
    assert collected[0].total_seconds > 0


def test_rounds_are_reported_as_they_end():
    rounds = []
    output = speculative("sometimes", prompts(), round_callback=rounds.append, return_dict_in_generate=True)
    assert [round_.is_prefill for round_ in rounds[:2]] == [True, False]
    assert [token for round_ in rounds for token in round_.emitted[0]] == new_tokens(output, prompts())[0]


class TestPipeline:
    def generator(self, **options):
        return pipeline("text-generation", model=target(), tokenizer=letters(), device="cpu", **options)

    def test_text_generation(self):
        collected, options = [], {"max_new_tokens": 12, "do_sample": False}
        expected = self.generator()("abcABC", **options)
        got = self.generator(assistant_model=drafter("sometimes"))(
            "abcABC", speculative_config=EXACT, stats_callback=collected.append, **options
        )
        assert got == expected
        assert collected[0].num_new_tokens == 12

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_batches_and_an_assistant_given_with_the_call(self, batch_size):
        questions, options = ["abcABC", "xyz", "0"], {"max_new_tokens": 8, "do_sample": False, "batch_size": batch_size}
        expected = self.generator()(questions, **options)
        config = SpeculativeConfig(drafting="hybrid", on_drafter_error="raise")
        more = {"speculative_config": config, "assistant_model": drafter("sometimes")}
        assert self.generator()(questions, **options, **more) == expected

    def test_a_checkpoint_cannot_relax_acceptance(self):
        """Up to 5.19 a pipeline passes the checkpoint's generation config as if the caller had written it."""
        model, options = copy.deepcopy(target()), {"max_new_tokens": 12, "do_sample": False}
        relaxed = EASDConfig(entropy_threshold=-1.0, overlap_threshold=0.0, on_drafter_error="raise")
        expected = pipeline("text-generation", model=model, tokenizer=letters(), device="cpu")("abcABC", **options)
        model.generation_config.speculative_config = relaxed
        generator = pipeline("text-generation", model=model, tokenizer=letters(), device="cpu")
        assert generator("abcABC", **options) == expected
        del model.generation_config.speculative_config
        asked = generator("abcABC", speculative_config=relaxed, assistant_model=drafter("sometimes"), **options)
        assert asked != expected

    def test_options_of_stock_assisted_decoding_are_refused_here_too(self):
        options = {"max_new_tokens": 8, "do_sample": False, "speculative_config": EXACT}
        generator = self.generator(assistant_model=drafter("sometimes"))
        with pytest.raises(InvalidConfigError, match="assistant_confidence_threshold"):
            generator("abcABC", assistant_confidence_threshold=0.6, **options)
        passed = GenerationConfig(max_new_tokens=8, do_sample=False, assistant_confidence_threshold=0.4)
        with pytest.raises(InvalidConfigError, match="assistant_confidence_threshold"):
            generator("abcABC", generation_config=passed, speculative_config=EXACT)
