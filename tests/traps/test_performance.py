"""Reports of slowness (group C), as counts of forward passes and of work: never as seconds."""

import copy
import math
import sys

import pytest
import torch
from transformers.generation import candidate_generator

from hf_specdec import AdditiveLength, ScriptedDrafter, SpeculativeConfig
from tests.toys import noisy_copy, prompts, tiny_llama
from tests.traps import ACCEPTED, EXACT, HYBRID, NGRAM, drafter, letters, plain, speculative, target, tokens


class Passes:
    """Counts a model's forward passes and the columns they were fed."""

    def __init__(self, model):
        self.columns = []
        self.handle = model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        self.columns.append((args[0] if args else kwargs["input_ids"]).shape[1])

    def __enter__(self):
        return self.columns

    def __exit__(self, *exception):
        self.handle.remove()


def counted(accepted, config, batch_size=1, num_tokens=16):
    """The columns fed to target and drafter in each pass, and the statistics."""
    model, assistant = tiny_llama(layers=2), copy.deepcopy(drafter(accepted))
    with Passes(model) as ours, Passes(assistant) as theirs:
        output = speculative(
            assistant, prompts(batch_size), config, model=model, max_new_tokens=num_tokens, return_dict_in_generate=True
        )
    return ours, theirs, output.speculative_stats


class TestForwardPasses:
    """C1: speculative decoding is slower than plain decoding."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize(
        "config", [EXACT, NGRAM, HYBRID, SpeculativeConfig()], ids=["model", "ngram", "hybrid", "auto"]
    )
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_never_more_than_plain_decoding(self, accepted, config, batch_size):
        ours, _, stats = counted(accepted, config, batch_size)
        assert len(ours) == stats.num_target_forwards <= 16
        assert ours[0] == 7
        assert sum(ours[1:]) <= 15 + stats.num_draft_tokens  # accepted tokens are not fed again

    @pytest.mark.parametrize("length", [1, 2, 4, 7])
    def test_drafts_that_are_always_right(self, length):
        config = SpeculativeConfig(drafting="model", length=length, on_drafter_error="raise")
        ours, theirs, stats = counted("always", config)
        assert len(ours) == 1 + math.ceil(15 / (length + 1))
        assert len(theirs) == stats.num_draft_tokens == stats.num_accepted_tokens
        assert theirs[0] == 8
        assert max(theirs[1:], default=0) <= 2  # the last draft and the bonus token

    def test_drafts_that_are_never_right_become_short(self):
        rounds = []
        config = SpeculativeConfig(drafting="model", length=AdditiveLength(initial=5), on_drafter_error="raise")
        speculative(
            lambda settings: ScriptedDrafter(settings, [[62] * 40]), prompts(), config, round_callback=rounds.append
        )
        assert [int(each.num_drafted) for each in rounds[1:-1]] == [5, 4, 3, 2, *[1] * 10]

    def test_length_zero_is_plain_decoding(self):
        ours, theirs, stats = counted("always", SpeculativeConfig(drafting="model", length=0))
        assert ours == [7] + [1] * 15
        assert theirs == []
        assert stats.acceptance_rate == 0.0

    def test_a_finished_row_costs_no_rounds(self):
        options = {"eos_token_id": int(plain(prompts(3))[1, 9]), "return_dict_in_generate": True}
        stats = speculative("always", prompts(3), **options).speculative_stats
        assert stats.rows[1].num_rounds <= 1
        assert stats.num_rounds == sum(row.num_rounds for row in stats.rows)


@pytest.mark.parametrize("sampled", [False, True])
def test_scikit_learn_makes_no_difference(sampled, monkeypatch):
    """C6: transformers' threshold was adapted only where scikit-learn is installed."""
    runs = []
    for blocked in (False, True):
        if blocked:
            for name in [each for each in sys.modules if each.split(".")[0] == "sklearn"] or ["sklearn"]:
                monkeypatch.setitem(sys.modules, name, None)
            monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
            with pytest.raises(ImportError):
                import sklearn  # noqa: F401
        torch.manual_seed(0)
        output = speculative(
            "sometimes",
            prompts(3),
            SpeculativeConfig(length=5),
            do_sample=sampled,
            top_k=8,
            return_dict_in_generate=True,
        )
        runs.append((tokens(output), [row.to_dict() for row in output.speculative_stats.rows]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("config", [EXACT, NGRAM, HYBRID], ids=lambda config: config.drafting)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_is_copied_deeply_in_the_loop(config, options, batch_size, monkeypatch):
    """C7: a deep copy of the generation config, with a tokenizer in it, in each round."""
    rounds, copies, deepcopy = [], [], copy.deepcopy

    def counting(*args, **kwargs):
        copies.extend(rounds[-1:])
        return deepcopy(*args, **kwargs)

    monkeypatch.setattr(copy, "deepcopy", counting)
    speculative("sometimes", prompts(batch_size), config, round_callback=rounds.append, tokenizer=letters(), **options)
    assert len(rounds) > 2
    assert not copies


def test_generate_is_called_once():
    """transformers' own assisted decoding calls the draft model's `generate` in each round, with all its preparation."""
    calls = []

    class Listening(type(target())):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            calls.append(1)
            return super().prepare_inputs_for_generation(*args, **kwargs)

    assistant = Listening(target().config).eval()
    assistant.load_state_dict(noisy_copy(target()).state_dict())
    assert tokens(speculative(assistant, prompts())) == tokens(plain(prompts()))
    assert not calls
