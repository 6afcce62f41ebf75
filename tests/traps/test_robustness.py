"""Reports of broken state and deadlocks (group F), and drafters that fail in the middle of a run."""

import datetime
import logging
import multiprocessing
import queue

import pytest
import torch
from torch import distributed
from transformers import DynamicCache, WhisperConfig, WhisperForConditionalGeneration

from hf_specdec import DrafterError, ScriptedDrafter, SpeculativeConfig, UnsupportedModelError
from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import AssistantDrafter
from hf_specdec.records import Draft
from tests.test_caches import assert_same_cache, sliding
from tests.toys import noisy_copy, prompts, tiny_llama
from tests.traps import EXACT, HYBRID, NGRAM, drafter, new_tokens, plain, speculative, target, text, tokens


class BombError(Exception):
    """What goes off in these tests."""


class Bomb:
    """Goes off at one call of a module: as a hook inside a layer, so that the layers before it have been reached."""

    def __init__(self, module, at, error):
        self.at, self.error, self.calls = at, error, 0
        self.handle = module.register_forward_pre_hook(self.call)

    def call(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise self.error

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.handle.remove()


MODELS = {"full": tiny_llama(layers=2), "sliding": sliding(6)}


class TestInterruptedForwardPasses:
    """F1: an exception in the middle of a layer leaves a model, or a cache, that gives wrong text from then on."""

    def inner_layer(self, model):
        return model.model.layers[1].self_attn

    @pytest.mark.parametrize("error", [BombError, KeyboardInterrupt])
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("name", MODELS)
    def test_the_cache_holds_a_prefix_of_the_text(self, name, batch_size, error):
        model, inputs = MODELS[name], prompts(batch_size)
        assistant = noisy_copy(model)
        options = {"max_new_tokens": 8, "eos_token_id": 1}
        whole = plain(inputs, model, **options)
        with Bomb(self.inner_layer(model), 0, None) as counter:
            speculative(assistant, inputs, model=model, cache=DynamicCache(config=model.config), **options)
        assert counter.calls > 3
        for at in range(1, counter.calls + 1):
            cache = DynamicCache(config=model.config)
            with Bomb(self.inner_layer(model), at, error()), pytest.raises(error):
                speculative(assistant, inputs, model=model, cache=cache, **options)
            held = cache.get_seq_length()
            assert held < whole.shape[1]
            if held == 0:
                continue
            assert held >= inputs["input_ids"].shape[1]
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, whole.shape[1]), value=1)
            reference = DynamicCache(config=model.config)
            plain(
                {"input_ids": whole[:, :held], "attention_mask": mask[:, :held]},
                model,
                cache=reference,
                max_new_tokens=1,
            )
            assert_same_cache(cache, reference, inputs)
        assert plain(inputs, model, **options).equal(whole)

    def test_most_of_the_text_survives(self):
        cache = DynamicCache()
        with Bomb(self.inner_layer(MODELS["full"]), 4, BombError()), pytest.raises(BombError):
            speculative("always", prompts(3), model=MODELS["full"], cache=cache, eos_token_id=1)
        assert cache.get_seq_length() > 12

    @pytest.mark.parametrize("in_use", [False, True])
    def test_an_interrupted_prompt_leaves_the_cache_as_it_was(self, in_use):
        model, inputs, cache = MODELS["full"], prompts(3), DynamicCache()
        if in_use:
            plain(inputs, model, cache=cache, max_new_tokens=4)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        longer = {name: torch.cat([value, torch.ones(3, 8, dtype=torch.long)], 1) for name, value in inputs.items()}
        with Bomb(self.inner_layer(model), 1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            speculative("always", longer, model=model, cache=cache)
        assert cache.get_seq_length() == (10 if in_use else 0)
        for layer, (keys, values) in zip(cache.layers, before, strict=False):
            assert layer.keys.equal(keys)
            assert layer.values.equal(values)


class Failing(AssistantDrafter):
    """Drafts well until the call at which it fails in some way."""

    def __init__(self, settings, model, at, way):
        super().__init__(settings, model)
        self.at, self.way, self.calls = at, way, 0

    def propose(self, context, budget):
        self.calls += 1
        draft = super().propose(context, budget)
        return self.way(draft, self.settings) if self.calls == self.at else draft


def raising(error):
    def way(draft, settings):
        raise error

    return way


def nan_laws(draft, settings):
    law = torch.full((*draft.tokens.shape, settings.vocab_size), float("nan"))
    return Draft(draft.tokens, draft.lengths, q=law)


WAYS = {
    "raises": raising(BombError("on purpose")),
    "out of memory": raising(torch.OutOfMemoryError("on purpose")),
    "stops": raising(StopIteration("on purpose")),
    "nan law": nan_laws,
    "too long": lambda draft, _: Draft(torch.zeros(len(draft.tokens), 40, dtype=torch.long), draft.lengths + 36),
    "bad ids": lambda draft, _: Draft(draft.tokens + 64, draft.lengths),
    "bad shape": lambda draft, _: Draft(draft.tokens[0], draft.lengths),
    "no draft": lambda draft, _: None,
}


class TestFailingDrafters:
    """`on_drafter_error`: by default the text goes on without drafts, and everyone is told once."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("at", [1, 3])
    @pytest.mark.parametrize("way", WAYS)
    def test_continue(self, way, at, batch_size, caplog):
        made = []

        def factory(settings):
            made.append(Failing(settings, drafter("sometimes"), at, WAYS[way]))
            return made[0]

        output = speculative(
            factory, prompts(batch_size), SpeculativeConfig(length=4), return_dict_in_generate=True, output_scores=True
        )
        assert tokens(output) == tokens(plain(prompts(batch_size)))
        stats = output.speculative_stats
        assert stats.events["drafter_failed"] == 1
        assert len(stats.problems) == 1
        assert "Failing" in stats.problems[0]
        assert made[0].calls == at
        assert (
            len([each for each in caplog.records if each.levelno == logging.WARNING and "Failing" in each.message]) == 1
        )

    @pytest.mark.parametrize("way", WAYS)
    def test_raise(self, way):
        config = SpeculativeConfig(length=4, on_drafter_error="raise")
        with pytest.raises((BombError, torch.OutOfMemoryError, RuntimeError, AttributeError)):
            speculative(lambda settings: Failing(settings, drafter("sometimes"), 2, WAYS[way]), prompts(), config)

    @pytest.mark.parametrize("sampled", [False, True])
    def test_a_model_whose_logits_become_nan(self, sampled):
        assistant = noisy_copy(target())
        with torch.no_grad():
            assistant.lm_head.weight[5] = float("nan")
        with pytest.raises(DrafterError, match="NaN"):
            speculative(assistant, prompts(), do_sample=sampled)
        options = {"do_sample": sampled, "top_k": 1 if sampled else None, "return_dict_in_generate": True}
        for config in (SpeculativeConfig(drafting="model"), SpeculativeConfig(drafting="hybrid")):
            output = speculative(assistant, prompts(3), config, **options)
            assert tokens(output) == tokens(plain(prompts(3)))
            assert output.speculative_stats.events["drafter_failed"] == 1

    def test_interrupts_go_through(self):
        config = SpeculativeConfig(length=4, on_drafter_error="continue")
        with pytest.raises(KeyboardInterrupt):
            speculative(
                lambda settings: Failing(settings, target(), 2, raising(KeyboardInterrupt())), prompts(), config
            )

    def test_a_factory_that_fails(self):
        cache = DynamicCache()
        with pytest.raises(ZeroDivisionError):
            speculative(lambda settings: 1 / 0, prompts(), cache=cache)
        assert cache.get_seq_length() <= 7


@pytest.mark.parametrize("place", ["target", "assistant"])
def test_whisper_is_refused_by_name(place):
    """F6: speculative decoding of encoder-decoders broke in at least six releases."""
    shape = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(**shape, **heads, **special, max_source_positions=8, max_target_positions=16)
    model = WhisperForConditionalGeneration(config).eval()
    options = {
        "assistant_model": drafter("never"),
        "speculative_config": EXACT,
        "input_features": torch.zeros(1, 8, 16),
    }
    if place == "assistant":
        model, options = (
            target(),
            prompts() | {"assistant_model": model, "speculative_config": EXACT, "max_new_tokens": 4},
        )
    with pytest.raises(UnsupportedModelError, match="WhisperForConditionalGeneration"):
        model.generate(**options)


@pytest.mark.parametrize("config", [EXACT, NGRAM, HYBRID], ids=lambda config: config.drafting)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_no_eos_anywhere(config, batch_size):
    """F8: an eos_token_id of None was an AttributeError in prompt lookup."""
    model = target()
    assert model.generation_config.eos_token_id is None
    assert model.config.eos_token_id is None
    assert tokens(speculative(None if config is NGRAM else "always", prompts(batch_size), config)) == tokens(
        plain(prompts(batch_size))
    )


def decode_in_step(rank, file, accepted, batch_size, answers):
    """One of several processes whose model can run only where all of them run theirs."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timeout)
    try:
        model, passes = tiny_llama(layers=2), []

        def all_together(*args):
            passes.append(1)
            distributed.all_reduce(torch.ones(1))

        model.register_forward_pre_hook(all_together)
        output = speculative(
            accepted[rank],
            prompts(batch_size),
            model=model,
            synced_gpus=True,
            return_dict_in_generate=True,
            eos_token_id=35,
        )
        answers.put((rank, tokens(output), len(passes), output[CACHE_KEY].get_seq_length()))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("accepted", [("always", "never"), ("never", "sometimes")])
def test_processes_that_accept_different_numbers_wait_for_each_other(accepted, batch_size, tmp_path):
    """F9: ZeRO-3 and FSDP hang when processes run different numbers of forward passes."""
    expected = tokens(plain(prompts(batch_size), eos_token_id=35))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=decode_in_step, args=(rank, tmp_path / "meet", accepted, batch_size, answers))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=120) for _ in processes)
    except queue.Empty:
        pytest.fail("the processes wait for each other for ever")
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    assert [each[1] for each in found] == [expected, expected]
    assert found[0][2] == found[1][2]
    assert {each[3] for each in found} == {len(expected[0]) - 1}


def test_a_script_that_ends_early():
    """A drafter with nothing to say costs nothing but its silence."""
    script = text()[0][1:6]
    output = speculative(
        lambda settings: ScriptedDrafter(settings, [[0, *script]]), prompts(), return_dict_in_generate=True
    )
    assert new_tokens(output, prompts()) == text()
