"""Reports about the interface (group B): batches, options that were ignored, vocabularies, wrappers, entry points."""

import copy

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_specdec
from hf_specdec import EASDConfig, IncompatibleDraftError, SpeculativeConfig, UnsupportedModelError, compatibility
from hf_specdec._compat import undecorated_model
from tests.toys import noisy_copy, prompts, tiny_llama
from tests.traps import (
    ACCEPTED,
    EXACT,
    HYBRID,
    NGRAM,
    drafter,
    letters,
    new_tokens,
    plain,
    speculative,
    target,
    text,
    tokens,
)


class TestBatches:
    """B1: "only supported for batch_size = 1"."""

    @pytest.mark.parametrize(
        ("method", "batching"), [(EXACT, "auto"), (EXACT, "lockstep"), (NGRAM, "auto"), (HYBRID, "auto")]
    )
    def test_rows_equal_their_own_runs(self, method, batching):
        inputs, accepted = prompts(4), None if method is NGRAM else "sometimes"
        config = SpeculativeConfig(drafting=method.drafting, length=4, on_drafter_error="raise", batching=batching)
        eos = text(4)[2][4]
        got = speculative(accepted, inputs, config, eos_token_id=eos, max_new_tokens=14, return_dict_in_generate=True)
        assert tokens(got) == tokens(plain(inputs, eos_token_id=eos, max_new_tokens=14))
        for row, generated in enumerate(new_tokens(got, inputs)):
            own = {"input_ids": inputs["input_ids"][row, inputs["attention_mask"][row] == 1][None]}
            alone = new_tokens(speculative(accepted, own, config, eos_token_id=eos, max_new_tokens=14), own)[0]
            assert generated[: len(alone)] == alone
            assert set(generated[len(alone) :]) <= {0}
            assert got.speculative_stats.rows[row].num_new_tokens == len(alone)

    def test_rows_accept_different_numbers_in_a_round(self):
        rounds = []
        speculative("sometimes", prompts(4), round_callback=rounds.append, eos_token_id=1, max_new_tokens=24)
        assert any(len(set(round_.num_accepted.tolist())) > 2 for round_ in rounds)

    def test_the_assistant_may_repeat_a_prompt(self):
        ids = prompts()["input_ids"].repeat(2, 1)
        assert tokens(speculative("sometimes", {"input_ids": ids})) == tokens(plain({"input_ids": ids}))


class TestDraftLength:
    """B2: `num_assistant_tokens` is silently ignored."""

    @pytest.mark.parametrize("place", ["keyword", "generation_config"])
    @pytest.mark.parametrize("number", [0, 1, 2, 5])
    def test_it_is_honoured(self, number, place):
        rounds, options = [], {"num_assistant_tokens": number, "max_new_tokens": 16, "pad_token_id": 0}
        if place == "generation_config":
            options = {"generation_config": GenerationConfig(**options)}
        config = SpeculativeConfig(drafting="model", on_drafter_error="raise")
        options |= {"assistant_model": drafter("always"), "speculative_config": config}
        target().generate(**prompts(), round_callback=rounds.append, **options)
        assert {int(round_.num_drafted) for round_ in rounds[1:-1]} == {number}

    def test_conflicts_and_nonsense(self):
        for options in ({"num_assistant_tokens": 3}, {"num_assistant_tokens": -1}, {"num_assistant_tokens": 2.5}):
            with pytest.raises(ValueError, match=r"num_assistant_tokens|length"):
                speculative("always", prompts(), EXACT, **options)
        with pytest.raises(ValueError, match="length must be"):
            speculative("always", prompts(), "exact", num_assistant_tokens=2.5)
        assert speculative("always", prompts(), EXACT, num_assistant_tokens=4).equal(plain(prompts()))

    def test_unknown_fields(self):
        with pytest.raises(TypeError, match="num_tokens"):
            SpeculativeConfig(num_tokens=3)


@pytest.mark.parametrize("method", [EXACT, HYBRID, SpeculativeConfig(drafting="model", on_drafter_error="raise")])
def test_a_second_call_equals_the_first(method):
    """B3: the adaptive length stays in the draft model's generation config."""
    model, assistant = tiny_llama(layers=2), noisy_copy(target())
    before = [each.generation_config.to_dict() for each in (model, assistant)]
    runs = [
        speculative(
            assistant, prompts(3), method, model=model, return_dict_in_generate=True, eos_token_id=1
        ).speculative_stats
        for _ in range(2)
    ]
    assert runs[0].num_draft_tokens == runs[1].num_draft_tokens
    assert [row.to_dict() for row in runs[0].rows] == [row.to_dict() for row in runs[1].rows]
    assert [each.generation_config.to_dict() for each in (model, assistant)] == before


def padded(model, rows, seed=7):
    """The model with its vocabulary padded by random, attractive rows."""
    wider = tiny_llama(layers=model.config.num_hidden_layers, vocab_size=64 + rows)
    weights = dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.randn(rows, 32, generator=generator)
        weights[name] = torch.cat([weights[name], extra])
    wider.load_state_dict(weights)
    return wider


class TestVocabularies:
    """B4: padded vocabularies of one tokenizer are refused, different tokenizers of one size are accepted."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_a_wider_draft(self, accepted, batch_size):
        rounds, assistant = [], padded(drafter(accepted), 8)
        output = speculative(assistant, prompts(batch_size), round_callback=rounds.append)
        assert tokens(output) == tokens(plain(prompts(batch_size)))
        if accepted == "always":
            assert sum(int(round_.num_accepted.sum()) for round_ in rounds) > 10

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_a_wider_target(self, accepted, batch_size):
        model = padded(target(), 8)
        expected = plain(prompts(batch_size), model)
        assert int(expected.max()) >= 64  # it says what the draft model has never heard of
        assert tokens(speculative(accepted, prompts(batch_size), model=model)) == tokens(expected)

    @pytest.mark.parametrize("wider", ["draft", "target"])
    def test_sampling(self, wider):
        model, assistant = (target(), padded(drafter("sometimes"), 8))
        if wider == "target":
            model, assistant = padded(target(), 8), drafter("sometimes")
        width = model.config.vocab_size
        output = speculative(assistant, prompts(3), model=model, do_sample=True, top_k=0, temperature=2.0)
        assert 0 <= int(output.min()) <= int(output.max()) < width
        one = speculative(assistant, prompts(3), model=model, do_sample=True, top_k=1)
        assert one.equal(plain(prompts(3), model))

    def test_different_tokenizers_of_one_size(self):
        ours, theirs = letters(), letters("_" + "".join(map(chr, range(ord("0") + 62, ord("0") - 1, -1))))
        assert len(ours) == len(theirs)
        with pytest.raises(IncompatibleDraftError, match="another tokenizer"):
            speculative("always", prompts(), tokenizer=ours, assistant_tokenizer=theirs)
        same = speculative("sometimes", prompts(), tokenizer=ours, assistant_tokenizer=letters())
        assert tokens(same) == tokens(plain(prompts()))

    def test_unknown_tokenizers_are_told_once(self, caplog):
        compatibility._warn_once.cache_clear()
        for _ in range(2):
            output = speculative("sometimes", prompts(), return_dict_in_generate=True)
            assert output.speculative_stats.events["tokenizers_unchecked"] == 1
        assert caplog.text.count("tokenizers of target and draft model are not known") == 1


def lora(model, merged=False, seed=0):
    """The model with a LoRA adapter that changes its text."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
    if merged:
        wrapped.merge_adapter()
    return wrapped


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestAdapters:
    """B5: a PEFT model fails as target or drafter."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("merged", [False, True])
    def test_lora_target(self, merged, batch_size):
        model, inputs = lora(target(), merged), prompts(batch_size)
        expected = plain(inputs, model)
        assert not expected.equal(plain(inputs))
        for assistant in (model, drafter("always"), undecorated_model(model)):
            output = speculative(assistant, inputs, model=model, return_dict_in_generate=True)
            assert tokens(output) == tokens(expected)
            assert output.speculative_stats.num_accepted_tokens > 0
        own = plain(inputs, model, custom_generate=hf_specdec.generate, drafter=drafter("always"))
        assert own.equal(expected)

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_lora_drafter(self, batch_size):
        assistant = lora(target())
        output = speculative(assistant, prompts(batch_size), return_dict_in_generate=True)
        assert tokens(output) == tokens(plain(prompts(batch_size)))
        assert 0 < output.speculative_stats.acceptance_rate < 1

    def test_a_disabled_adapter(self):
        model = lora(target())
        with model.disable_adapter():
            assert tokens(speculative(model, prompts(), model=model)) == tokens(plain(prompts()))

    @pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
    def test_virtual_tokens_are_refused(self, kind):
        """PEFT cuts what is fed down to one token, so that a draft is never judged as a whole."""
        config, seen = kind(task_type="CAUSAL_LM", num_virtual_tokens=3), []
        model = peft.get_peft_model(copy.deepcopy(target()), config).eval()
        model.get_base_model().register_forward_pre_hook(lambda *_: seen.append(True))
        for role in ({"model": model}, {"accepted": model}):
            with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM .*\({kind.__name__}\)"):
                speculative(**{"accepted": "sometimes", "inputs": prompts()} | role)
        with pytest.raises(UnsupportedModelError, match=kind.__name__):
            plain(prompts(), model, custom_generate=hf_specdec.generate, drafter=drafter("always"))
        assert not seen
        with model.disable_adapter():
            assert tokens(speculative("sometimes", prompts(), model=model)) == tokens(plain(prompts()))


class TwoDevices(TorchFunctionMode):
    """Makes `THERE` a device of its own: what was not moved from one to the other does not mix."""

    def put(self, model):
        for each in (*model.parameters(), *model.buffers()):
            each.there = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        places = {getattr(each, "there", False) for each in leaves if isinstance(each, Tensor) and each.dim() > 0}
        if function == Tensor.device.__get__:
            return THERE if places == {True} else HERE
        named = {
            torch.device(each) == THERE for each in leaves if isinstance(each, torch.device) or each in ("cpu", "meta")
        }
        if function is Tensor.to and not named:
            named = {getattr(each, "there", False) for each in leaves[1:] if isinstance(each, Tensor)}
        moves = function in (Tensor.to, Tensor.copy_)
        if function is Tensor.cpu:
            moves, named = True, {False}
        masked = (
            function is nn.functional.scaled_dot_product_attention
        )  # masks are built under vmap, which drops the mark
        if len(places) == 2 and not moves and not masked:
            raise RuntimeError(f"expected all tensors to be on the same device in {function.__name__}")
        place = named.pop() if named else True in places
        result = function(*args, **kwargs)
        if moves and {place} != places and isinstance(result, Tensor):
            result = result.clone()
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and function is not Tensor.copy_:
                each.there = place
        return result


HERE, THERE = torch.device("cpu"), torch.device("cpu", 1)
EASD = EASDConfig(length=3, on_drafter_error="raise")


class TestDevices:
    """B9: "expected all tensors to be on the same device"."""

    @pytest.mark.parametrize(
        ("config", "sampled", "batch_size"), [(EXACT, False, 1), (EXACT, True, 3), (EASD, True, 1), (HYBRID, False, 3)]
    )
    def test_a_drafter_on_another_device(self, config, sampled, batch_size):
        assistant, inputs = noisy_copy(target()), prompts(batch_size)
        options = {
            "do_sample": sampled,
            "top_k": 8 if sampled else None,
            "repetition_penalty": 1.2,
            "max_new_tokens": 8,
        }
        torch.manual_seed(0)
        expected = speculative(assistant, inputs, config, **options)
        torch.manual_seed(0)
        with TwoDevices() as devices:
            devices.put(assistant)
            assert assistant.device == THERE
            output = speculative(assistant, inputs, config, **options)
        assert output.equal(expected)

    def test_the_two_devices_do_not_mix(self):
        with TwoDevices() as devices:
            layer = nn.Linear(2, 2)
            devices.put(layer)
            with pytest.raises(RuntimeError, match="same device"):
                layer(torch.ones(1, 2))
            layer(torch.ones(1, 2).to(layer.weight.device))


class MultiTokenEOS(StoppingCriteria):
    """As evaluation harnesses stop a batch: rows that are done are remembered, and one answer is given for all."""

    def __init__(self, sequence, tokenizer, prompt_columns, batch_size):
        self.sequence, self.tokenizer, self.prompt_columns = sequence, tokenizer, prompt_columns
        self.done = [False] * batch_size

    def __call__(self, input_ids, scores, **kwargs):
        lookback = input_ids[:, self.prompt_columns :][:, -(len(self.sequence) + 2) :]
        for row, recent in enumerate(self.tokenizer.batch_decode(lookback)):
            self.done[row] = self.done[row] or self.sequence in recent
        return False not in self.done


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("accepted", ACCEPTED)
def test_options_as_evaluation_harnesses_pass_them(accepted, batch_size):
    """B10: scores move with speculative decoding, and `until` stops are missed."""
    tokenizer, inputs = letters(), prompts(batch_size)
    columns = inputs["input_ids"].shape[1]
    ends = [tokenizer.decode(row[4:6]) for row in text(batch_size)]

    def options():
        criteria = [MultiTokenEOS(end, tokenizer, columns, batch_size) for end in [*ends, "~"]]
        return {
            "max_new_tokens": None,
            "max_length": columns + 20,
            "stopping_criteria": StoppingCriteriaList(criteria),
            "use_cache": True,
            "do_sample": False,
            "eos_token_id": 63,
        }

    assert tokens(speculative(accepted, inputs, **options())) == tokens(plain(inputs, **options()))


class TestCustomGenerateOfOthers:
    """B12: infinite recursion, and trust in local code."""

    def test_a_callable_that_calls_generate_again(self):
        calls = []

        def own(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            calls.append(1)
            return speculative("sometimes", {"input_ids": input_ids}, max_new_tokens=6)

        assert tokens(plain(prompts(), custom_generate=own)) == tokens(plain(prompts(), max_new_tokens=6))
        assert len(calls) == 1

    def test_a_folder(self, tmp_path):
        (tmp_path / "custom_generate").mkdir()
        (tmp_path / "custom_generate" / "generate.py").write_text(
            "import hf_specdec\n\n\ndef generate(model, drafter=None, **kwargs):\n"
            '    kwargs.pop("custom_generate", None)\n'
            "    return model.generate(custom_generate=hf_specdec.generate, drafter=drafter, **kwargs)\n"
        )
        (tmp_path / "config.json").write_text("{}")
        options = {"custom_generate": str(tmp_path), "trust_remote_code": True, "drafter": drafter("sometimes")}
        assert tokens(plain(prompts(), **options)) == tokens(plain(prompts()))

    def test_an_assistant_that_is_decoded_by_the_hook_itself(self):
        """A factory may use `generate` of its own; the hook does not mistake that for the call it serves."""

        def factory(settings):
            continuation = new_tokens(plain(prompts(), max_new_tokens=16), prompts())
            return hf_specdec.ScriptedDrafter(settings, continuation)

        output = speculative(factory, prompts(), return_dict_in_generate=True)
        assert output.speculative_stats.acceptance_rate == 1.0


def test_stop_strings_are_prepared_once(monkeypatch):
    """B13: `StopStringCriteria` takes seconds to build for a large vocabulary, and was built in each round."""
    built, init = [], StopStringCriteria.__init__

    def counted(self, *args, **kwargs):
        built.append(args)
        init(self, *args, **kwargs)

    monkeypatch.setattr(StopStringCriteria, "__init__", counted)
    tokenizer = letters()
    speculative("sometimes", prompts(), stop_strings=[tokenizer.decode([1, 1])], tokenizer=tokenizer)
    assert len(built) == 1
