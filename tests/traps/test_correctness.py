"""Reports of wrong text (group A): stop rules, processors, caches, seeds, windows and the law that is sampled from."""

import itertools
from functools import cache

import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    WatermarkingConfig,
)

from hf_specdec import ConfidenceLength, ScriptedDrafter, SpeculativeConfig
from hf_specdec.acceptance.exact import exact_acceptance, exact_replacement
from hf_specdec.drafters import AssistantDrafter
from hf_specdec.records import Evidence
from tests.toys import noisy_copy, prompts
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
    text,
    tokens,
)


TEXT = text(max_new_tokens=16)[0]
METHODS = {"model": EXACT, "ngram": NGRAM, "hybrid": HYBRID}


@cache
def fifty():
    return tokens(plain(prompts(50)))


def assistant_for(method, accepted):
    return None if method == "ngram" else accepted


class TestGreedyEquality:
    """A1: at temperature 0 the speculative text differs from plain greedy decoding."""

    @pytest.mark.parametrize("accepted", ACCEPTED)
    @pytest.mark.parametrize("length", range(1, 9))
    def test_fifty_prompts(self, accepted, length):
        inputs = prompts(50)
        config = SpeculativeConfig(drafting="model", length=length, on_drafter_error="raise")
        assert tokens(speculative(accepted, inputs, config)) == fifty()

    @pytest.mark.parametrize("method", ["ngram", "hybrid"])
    def test_other_drafters(self, method):
        inputs = prompts(50)
        output = speculative("sometimes" if method == "hybrid" else None, inputs, METHODS[method], max_new_tokens=24)
        assert tokens(output) == tokens(plain(inputs, max_new_tokens=24))

    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_a_confidence_bound(self, accepted):
        inputs = prompts(8)
        config = SpeculativeConfig(drafting="model", length=ConfidenceLength(0.4, 6), on_drafter_error="raise")
        assert tokens(speculative(accepted, inputs, config)) == tokens(plain(inputs))

    def test_half_precision_differs_only_at_near_ties(self):
        model = noisy_copy(target(), noise=0.0).to(torch.bfloat16)
        for seed in range(6):
            inputs = prompts(1, seed=seed)
            reference = plain(inputs, model, return_dict_in_generate=True, output_logits=True)
            got = new_tokens(speculative("sometimes", inputs, model=model), inputs)[0]
            expected = new_tokens(reference, inputs)[0]
            if got != expected:
                step = next(i for i, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
                best, second = reference.logits[step][0].float().topk(2).values.tolist()
                assert best - second <= 4 * abs(best) * torch.finfo(torch.bfloat16).eps


class TestEndOfSequence:
    """A2: an EOS accepted in the middle of a block; generation runs past it."""

    @pytest.mark.parametrize("token", sorted(set(TEXT)))
    def test_every_token_as_eos(self, token):
        expected = tokens(plain(prompts(), eos_token_id=token))
        for accepted in ACCEPTED:
            assert tokens(speculative(accepted, prompts(), eos_token_id=token)) == expected
        assert expected[0][-1] == token

    @pytest.mark.parametrize("pair", list(itertools.combinations(sorted(set(TEXT)), 2))[::4])
    def test_pairs_of_eos(self, pair):
        expected = tokens(plain(prompts(), eos_token_id=list(pair)))
        assert tokens(speculative("always", prompts(), eos_token_id=list(pair))) == expected

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("token", sorted({row[4] for row in text(4)}))
    def test_rows_end_at_different_times(self, method, token):
        inputs, options = prompts(4), {"eos_token_id": token}
        output = speculative(assistant_for(method, "always"), inputs, METHODS[method], **options)
        assert tokens(output) == tokens(plain(inputs, **options))

    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_eos_in_the_prompt_does_not_stop(self, accepted):
        inputs = prompts()
        token = int(inputs["input_ids"][0, 2])
        expected = tokens(plain(inputs, eos_token_id=token))
        assert tokens(speculative(accepted, inputs, eos_token_id=token)) == expected
        assert len(expected[0]) > inputs["input_ids"].shape[1] + 1

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_no_eos_at_all(self, method, batch_size):
        inputs = prompts(batch_size)
        output = speculative(assistant_for(method, "sometimes"), inputs, METHODS[method], eos_token_id=None)
        assert tokens(output) == tokens(plain(inputs, eos_token_id=None))

    def test_the_bonus_token_is_eos(self):
        # The prefill gives token 0, drafts of three are accepted whole, and each fourth token after it is a bonus.
        config = SpeculativeConfig(drafting="model", length=3, on_drafter_error="raise")
        token = next(t for i, t in enumerate(TEXT) if i % 4 == 0 and i > 0 and t not in TEXT[:i])
        output = speculative("always", prompts(), config, eos_token_id=token, return_dict_in_generate=True)
        assert tokens(output) == tokens(plain(prompts(), eos_token_id=token))
        assert output.speculative_stats.acceptance_rate == 1.0
        assert (output.speculative_stats.num_new_tokens - 1) % 4 == 0


class TestStatefulProcessors:
    """A8: structured output; a processor with state is called for rejected positions and by the drafter."""

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("batch_size", [1, 4])
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_counting_calls(self, method, batch_size, accepted):
        inputs, expected, got = prompts(batch_size), Counting(), Counting()
        reference = plain(inputs, logits_processor=[expected])
        output = speculative(assistant_for(method, accepted), inputs, METHODS[method], logits_processor=[got])
        assert tokens(output) == tokens(reference)
        assert got.log == expected.log

    def test_rows_that_have_ended(self):
        inputs, expected, got = prompts(4), Counting(), Counting()
        ending = new_tokens(plain(inputs, logits_processor=[Counting()]), inputs)[1][3]
        options = {"eos_token_id": ending}
        reference = plain(inputs, logits_processor=[expected], **options)
        assert tokens(speculative("sometimes", inputs, logits_processor=[got], **options)) == tokens(reference)
        assert got.log == expected.log

    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_rows_that_look_at_each_other(self, accepted):
        """What has ended is shown to processors as plain decoding shows it."""
        inputs, options = prompts(3), {"logits_processor": [lambda ids, scores: scores + scores.roll(1, 0)]}
        for ending in {row[4] for row in new_tokens(plain(inputs, **options), inputs)}:
            options["eos_token_id"] = ending
            assert tokens(speculative(accepted, inputs, **options)) == tokens(plain(inputs, **options))


ALLOWED = {
    "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 5 + 3 + row) % 64, (int(ids[-1]) * 11 + 1) % 64]
}
PROCESSORS = {
    "bad words": {"bad_words_ids": [[TEXT[3]], [TEXT[1], TEXT[2]]]},
    "begin suppress": {"begin_suppress_tokens": [TEXT[0]]},
    "bias": {"sequence_bias": [[[TEXT[2]], -10.0], [[TEXT[0], TEXT[1]], 5.0]]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 5},
    "encoder repetition": {"encoder_repetition_penalty": 1.5},
    "forced bos": {"forced_bos_token_id": 9},
    "forced eos": {"forced_eos_token_id": 5},
    "guidance": {"guidance_scale": 1.7},
    "invalid values": {"remove_invalid_values": True},
    "min length": {"min_length": 12, "eos_token_id": TEXT[2]},
    "min new tokens": {"min_new_tokens": 6, "eos_token_id": TEXT[2]},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "prefix": ALLOWED,
    "renormalised": {"renormalize_logits": True},
    "repetition": {"repetition_penalty": 1.8},
    "suppress": {"suppress_tokens": [TEXT[0], TEXT[4]]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "together": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "eos_token_id": TEXT[2]},
}
WITHOUT_EFFECT = ("forced bos", "invalid values", "renormalised")  # on these prompts and logits


class TestProcessors:
    """A9: a processor is ignored, or applied to the first token of a block only."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("name", PROCESSORS)
    def test_greedy(self, name, batch_size):
        inputs, options = prompts(batch_size), {"max_new_tokens": 10} | PROCESSORS[name]
        expected = tokens(plain(inputs, **options))
        for accepted in ("always", "sometimes"):
            assert tokens(speculative(accepted, inputs, **options)) == expected
        assert tokens(speculative(None, inputs, NGRAM, **options)) == expected
        if name not in WITHOUT_EFFECT:
            assert expected != tokens(plain(inputs, max_new_tokens=10))

    def test_a_forced_first_token(self):
        inputs = {"input_ids": torch.tensor([[10]])}
        output = speculative("sometimes", inputs, forced_bos_token_id=9)
        assert tokens(output) == tokens(plain(inputs, forced_bos_token_id=9))
        assert tokens(output)[0][1] == 9

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize(
        "warpers",
        [
            {"top_k": 1},
            {"top_p": 1e-6},
            {"min_p": 1.0},
            {"typical_p": 1e-6, "top_k": 1},
            {"temperature": 1e-3, "top_k": 0},
            {"top_p": 0.9, "temperature": 0.1, "top_k": 1, "repetition_penalty": 1.5},
        ],
    )
    def test_sampling_from_one_token_is_greedy(self, warpers, batch_size):
        inputs, penalty = prompts(batch_size), {k: v for k, v in warpers.items() if k == "repetition_penalty"}
        expected = tokens(plain(inputs, **penalty, max_new_tokens=10))
        for accepted in ACCEPTED:
            output = speculative(accepted, inputs, do_sample=True, max_new_tokens=10, **warpers)
            assert tokens(output) == expected

    @pytest.mark.parametrize(
        "warpers", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"typical_p": 0.4}, {"top_k": 4, "temperature": 0.5}]
    )
    def test_sampled_tokens_lie_in_the_support(self, warpers):
        inputs, options = prompts(3), {"do_sample": True, "top_k": 0} | warpers
        output = speculative(
            "sometimes", inputs, return_dict_in_generate=True, output_scores=True, max_new_tokens=12, **options
        )
        for step, scores in enumerate(output.scores):
            chosen = output.sequences[:, 7 + step]
            assert bool(scores.gather(1, chosen[:, None]).isfinite().all())
            assert int(scores.isfinite().sum(-1).max()) < 64


class Spying(AssistantDrafter):
    """Keeps the contexts and drafts of a run."""

    def __init__(self, settings, model):
        super().__init__(settings, model)
        self.seen = []

    def propose(self, context, budget):
        draft = super().propose(context, budget)
        self.seen.append((context, draft))
        return draft


class TestDraftLaw:
    """A5: acceptance uses a law that the draft was not drawn from."""

    def spied(self, **options):
        made = []

        def factory(settings):
            made.append(Spying(settings, drafter("sometimes")))
            return made[0]

        speculative(factory, prompts(), max_new_tokens=12, **options)
        return made[0].seen

    @pytest.mark.parametrize("warpers", [{"top_k": 3}, {"top_k": 0, "top_p": 0.7}, {"temperature": 0.5, "top_k": 4}])
    def test_q_is_the_processed_law_of_the_drafter(self, warpers):
        for context, draft in self.spied(do_sample=True, **warpers):
            for i in range(draft.width):
                prefix = torch.cat([context.tokens[:, : int(context.lengths[0])], draft.tokens[:, :i]], 1)
                reference = plain(
                    {"input_ids": prefix},
                    drafter("sometimes"),
                    **({"do_sample": True, "max_new_tokens": 1, "output_scores": True} | warpers),
                    return_dict_in_generate=True,
                )
                torch.testing.assert_close(draft.q[0, i], reference.scores[0][0].softmax(-1), atol=1e-5, rtol=0)

    def test_a_greedy_draft_is_a_point_mass(self):
        assert all(draft.q is None for _, draft in self.spied())

    def test_accepted_and_corrected_mass_is_the_target_law(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(64, 2, 8, generator=generator, dtype=torch.double) * 2
        logits[:, 0, 5:] = float("-inf")  # what top-k does to the target, not to the drafter
        scores, q = logits[:, :1], logits[:, 1:].softmax(-1)
        emitted = torch.zeros(64, 8, dtype=torch.double)
        for token in range(8):
            drafted = torch.full((64, 1), token)
            evidence = Evidence(drafted, torch.ones(64, 1, dtype=torch.bool), scores, scores, do_sample=True, q=q)
            accepted = exact_acceptance(evidence)[:, 0]
            emitted[:, token] += q[:, 0, token] * accepted
            emitted += (q[:, 0, token] * (1 - accepted))[:, None] * exact_replacement(evidence)
        torch.testing.assert_close(emitted, scores[:, 0].softmax(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_prompt_of_one_token(method, max_new_tokens, batch_size):
    """A11."""
    inputs = {"input_ids": torch.tensor([[10], [10]])[:batch_size]}
    for accepted in ACCEPTED:
        output = speculative(assistant_for(method, accepted), inputs, METHODS[method], max_new_tokens=max_new_tokens)
        assert tokens(output) == tokens(plain(inputs, max_new_tokens=max_new_tokens))


@pytest.mark.parametrize(
    ("attention", "window", "batch_size"), [("eager", 6, 3), ("sdpa", 6, 3), ("eager", 8, 1), ("sdpa", 8, 1)]
)
def test_a_sliding_window_is_crossed(attention, window, batch_size):
    """A12: models with a sliding window crash or go wrong once the text is longer than the window."""
    config = MistralConfig(
        **{name: getattr(target().config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")},
        **{name: getattr(target().config, name) for name in ("num_hidden_layers", "num_attention_heads")},
        num_key_value_heads=2,
        initializer_range=0.3,
        sliding_window=window,
        attn_implementation=attention,
    )
    model = MistralForCausalLM(config).eval()
    inputs = prompts(batch_size)
    expected = tokens(plain(inputs, model, max_new_tokens=30, eos_token_id=None))
    for assistant in (model, noisy_copy(model), drafter("never")):
        output = speculative(assistant, inputs, model=model, max_new_tokens=30, eos_token_id=None)
        assert tokens(output) == expected


def test_a_recurrent_state_is_refused():
    """A13: rejected drafts would stay in the state."""
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**shape, eos_token_id=None, pad_token_id=0)).eval()
    for options in ({"model": model, "accepted": "never"}, {"model": target(), "accepted": model}):
        with pytest.raises(ValueError, match="MambaForCausalLM keeps a recurrent state"):
            speculative(inputs=prompts(), **options)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_seed_reproduces_its_text(method, batch_size):
    """A14."""
    texts = []
    for seed in (42, 42, 43):
        torch.manual_seed(seed)
        texts.append(
            tokens(
                speculative(
                    assistant_for(method, "sometimes"), prompts(batch_size), METHODS[method], do_sample=True, top_k=0
                )
            )
        )
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


class TestUnverifiedDrafts:
    """A15: the first token of an n-gram draft is committed without being verified."""

    def test_a_repeated_prompt(self):
        inputs = {"input_ids": torch.tensor([[1, 1, 1]])}
        expected = plain(inputs)
        assert new_tokens(expected, inputs)[0][0] != 1
        assert tokens(speculative(None, inputs, NGRAM)) == tokens(expected)

    def test_a_drafter_that_always_proposes_one_token(self):
        assert 62 not in TEXT
        output = speculative(
            lambda settings: ScriptedDrafter(settings, [[62] * 40]), prompts(), return_dict_in_generate=True
        )
        assert tokens(output) == tokens(plain(prompts()))
        assert output.speculative_stats.num_accepted_tokens == 0
        assert output.speculative_stats.num_verified_tokens > 0
