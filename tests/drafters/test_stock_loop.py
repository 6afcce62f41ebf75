"""Each drafter as a candidate generator inside transformers' own assisted decoding, which knows nothing of this package."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec import AutoDrafter, ExitHeads, ExitHeadsConfig, UnsupportedModelError
from hf_specdec.drafters import (
    AssistantDrafter,
    DraftSettings,
    HybridDrafter,
    PromptLookupDrafter,
    ScriptedDrafter,
)
from tests.networks import small_target
from tests.toys import drafters_for, noisy_copy, tiny_llama


NEW_TOKENS = 14
PROMPTS = {"words": [5, 6, 7, 8, 5, 6, 7], "one token": [10]}


def with_drafter(model, make_drafter):
    """A copy of the model whose own `_get_candidate_generator` returns our drafter; and the drafters it made."""
    made = []

    class Injected(type(model)):
        def _get_candidate_generator(self, generation_config, input_ids, **others):
            made.append(make_drafter(generation_config, others["logits_processor"]))
            return made[-1]

    twin = copy.deepcopy(model)
    twin.__class__ = Injected
    return twin, made


def settings_of(generation_config, processors, **options):
    eos = generation_config._eos_token_tensor
    return DraftSettings(
        vocab_size=64,
        do_sample=bool(generation_config.do_sample),
        warpers=processors,
        eos_token_ids=() if eos is None else tuple(eos.tolist()),
        max_length=generation_config.max_length,
        max_tokens=4,
        **options,
    )


def maker(kind, model, text=()):
    """A function that makes the drafter of one kind for a run of the model, whose greedy text is `text`."""

    def ngram(config, processors):
        return PromptLookupDrafter(settings_of(config, processors))

    def scripted(config, processors):
        """Right at first, wrong from the fourth token on."""
        return ScriptedDrafter(settings_of(config, processors), [[*text[:3], 63, 62, 61]], prompt_columns=0)

    if kind in ("ngram", "scripted"):
        return {"ngram": ngram, "scripted": scripted}[kind]
    draft_model = drafters_for(model)["sometimes" if kind == "hybrid" else kind]

    def assistant(config, processors):
        return AssistantDrafter(settings_of(config, processors), draft_model)

    def hybrid(config, processors):
        return HybridDrafter(settings_of(config, processors), ngram(config, processors), assistant(config, processors))

    return hybrid if kind == "hybrid" else assistant


KINDS = ["always", "sometimes", "never", "ngram", "hybrid", "scripted"]


def decode(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **options})


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_plain_decoding(kind, prompt):
    """With `prompt_lookup_num_tokens` transformers chooses assisted decoding; its own generator is never made."""
    model, ids = tiny_llama(layers=2), torch.tensor([PROMPTS[prompt]])
    text = decode(model, ids)
    injected, made = with_drafter(model, maker(kind, model, text[0, ids.shape[1] :].tolist()))
    out = decode(injected, ids, prompt_lookup_num_tokens=3, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(out.sequences, text)
    assert len(made) == 1
    assert len(out.scores) == NEW_TOKENS


def test_it_is_chosen_by_assistant_model_too():
    model, ids = tiny_llama(layers=2), torch.tensor([PROMPTS["words"]])
    drafter = noisy_copy(model)
    injected, made = with_drafter(model, maker("sometimes", model))
    assert torch.equal(decode(injected, ids, assistant_model=drafter), decode(model, ids))
    assert isinstance(made[0], AssistantDrafter)


@pytest.mark.parametrize("kind", ["always", "sometimes", "hybrid"])
def test_fewer_forward_passes_are_run(kind):
    """So the drafts are really accepted there, round after round, and the drafter's cache follows."""
    model, ids = tiny_llama(layers=2), torch.tensor([PROMPTS["words"]])
    injected, _ = with_drafter(model, maker(kind, model))
    passes = []
    injected.register_forward_pre_hook(lambda *_: passes.append(1))
    decode(injected, ids, prompt_lookup_num_tokens=3)
    assert len(passes) == 3 if kind == "always" else len(passes) < NEW_TOKENS  # 5 + 5 + 4 tokens


@pytest.mark.parametrize("kind", KINDS)
def test_eos_and_processors_are_those_of_plain_decoding(kind):
    model, ids = tiny_llama(layers=1), torch.tensor([PROMPTS["words"]])
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    text = decode(model, ids, **options)
    injected, _ = with_drafter(model, maker(kind, model, text[0, ids.shape[1] :].tolist()))
    for position in (9, 12):
        options["eos_token_id"] = int(text[0, position])
        plain = decode(model, ids, **options)
        assert plain.shape[1] <= position + 1
        assert torch.equal(decode(injected, ids, prompt_lookup_num_tokens=3, **options), plain)


def settings(**options):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)])
    return DraftSettings(vocab_size=64, do_sample=True, warpers=warpers, max_tokens=4, **options)


class Watched:
    """Remembers what a drafter proposed."""

    def __init__(self, drafter):
        self.drafter, self.drafts, inner = drafter, [], drafter.propose

        def propose(context, budget):
            self.drafts.append(inner(context, budget))
            return self.drafts[-1]

        drafter.propose = propose


def stock_law(candidate_logits):
    """What `_speculative_sampling` makes of the logits it is given."""
    return candidate_logits.softmax(-1)


def test_the_logits_handed_over_have_exactly_the_sampled_law():
    model = tiny_llama(layers=2)
    watched = Watched(AssistantDrafter(settings(), noisy_copy(model)))
    text = torch.tensor([PROMPTS["words"]])
    for _ in range(6):
        candidates, logits = watched.drafter.get_candidates(text)
        draft = watched.drafts[-1]
        assert torch.equal(candidates, torch.cat([text, draft.tokens], 1))
        assert logits.shape == (1, 4, 64)
        law = stock_law(logits)
        torch.testing.assert_close(law, draft.q, atol=1e-6, rtol=0)
        assert torch.equal(law > 0, draft.q > 0)
        assert bool(((law > 0).sum(-1) == 9).all())
        assert bool((law.gather(-1, draft.tokens[..., None]) > 0).all())
        text = torch.cat([candidates[:, :-2], torch.tensor([[3]])], 1)


def test_the_handed_over_law_is_the_models_own():
    """Against logits computed without a cache, on the prefix as transformers passes it."""
    model, text = tiny_llama(layers=2), torch.tensor([PROMPTS["words"]])
    drafter = noisy_copy(model)
    candidates, logits = AssistantDrafter(settings(), drafter).get_candidates(text)
    with torch.no_grad():
        raw = drafter(candidates).logits[:, 6:-1]
    expected = settings().warpers(None, raw[0].clone()).softmax(-1)
    torch.testing.assert_close(stock_law(logits)[0], expected, atol=1e-5, rtol=0)


def test_point_masses_are_handed_over_without_logits():
    """Transformers then draws from the target and keeps candidates that agree: the same law."""
    repeated = torch.tensor([[5, 6, 7, 5, 6]])
    candidates, logits = PromptLookupDrafter(settings()).get_candidates(repeated)
    assert candidates.tolist() == [[5, 6, 7, 5, 6, 7, 5, 6]]
    assert logits is None


@pytest.mark.parametrize(("max_length", "drafted"), [(None, 4), (20, 4), (9, 1), (8, 0), (7, 0), (5, 0)])
def test_candidates_leave_room_for_the_targets_own_token(max_length, drafted):
    text = torch.tensor([PROMPTS["words"]])
    drafter = AssistantDrafter(settings(max_length=max_length), tiny_llama(layers=1))
    candidates, logits = drafter.get_candidates(text)
    assert candidates.shape == (1, 7 + drafted)
    assert (logits is None) == (drafted == 0)


@pytest.mark.parametrize("kind", ["sometimes", "ngram", "hybrid"])
def test_sampled_runs_are_repeatable_and_complete(kind):
    model, ids, texts = tiny_llama(layers=1), torch.tensor([PROMPTS["words"]]), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        injected, made = with_drafter(model, maker(kind, model))
        texts.append(decode(injected, ids, do_sample=True, temperature=1.3, top_k=9, prompt_lookup_num_tokens=3))
        assert len(made) == 1
    assert texts[0].shape == (1, ids.shape[1] + NEW_TOKENS)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_drafter_network_without_a_config_of_ours_is_refused_by_name(family, do_sample):
    model = small_target()
    network = AutoDrafter.from_target(model, family)
    with pytest.raises(UnsupportedModelError, match=rf"{type(network).__name__} reads .* pass speculative_config="):
        model.generate(torch.tensor([[5, 6]]), assistant_model=network, do_sample=do_sample, max_new_tokens=4)


def test_exit_heads_without_a_config_of_ours_are_refused_by_name():
    model = small_target()
    heads = ExitHeads(ExitHeadsConfig(exit_layers=(2,)))
    with pytest.raises(UnsupportedModelError, match="ExitHeads reads"):
        model.generate(torch.tensor([[5, 6]]), assistant_model=heads, max_new_tokens=4)
