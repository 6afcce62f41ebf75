"""EASD on n-gram drafts and through `generate`."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hf_specdec import EASDConfig, ExactConfig, InvalidConfigError, SpeculativeConfig
from hf_specdec.acceptance import EASD, Exact
from hf_specdec.drafters import DrafterBase, DraftSettings, HybridDrafter
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.verify import evidence_of
from tests.acceptance.easd import COUNTERS, UNSURE, fired_law, fires, one_position
from tests.toys import noisy_copy, prompts, tiny_llama


# --- n-gram drafts --------------------------------------------------------------------------------------------------


class Fixed(DrafterBase):
    """Proposes one recorded draft."""

    def __init__(self, draft):
        super().__init__(DraftSettings(vocab_size=draft.logits.shape[-1] if draft.logits is not None else 8))
        self.draft = draft

    def propose(self, context, budget):
        return self.draft

    def match(self, context, max_tokens):
        return self.draft


@pytest.mark.parametrize("threshold", [2.0, 0.0, -1.0])
def test_it_never_fires_on_an_ngram_draft(threshold):
    """A point mass has no entropy; no threshold makes it uncertain."""
    assert not fires(EASD(threshold, threshold, 0.0), one_position(UNSURE, None))


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_it_fires_on_the_modelled_rows_of_a_hybrid_draft_only(threshold):
    laws = torch.full((2, 2, 8), 1 / 8)
    ngram = Draft(torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([3, 0]), source="ngram")
    model = Draft(torch.tensor([[0, 0], [6, 7]]), torch.tensor([0, 2]), q=laws, logits=laws.log(), source="model")
    drafter = HybridDrafter(DraftSettings(vocab_size=8), Fixed(ngram), Fixed(model))
    context = Context.of(torch.zeros(2, 4, dtype=torch.long))
    draft = drafter.propose(context, Budget(torch.tensor([3, 3])))
    scores = torch.zeros(2, 3, 8)
    evidence = evidence_of(draft, scores, scores, True, 0, 3)
    rule = EASD(threshold, threshold, 0.0)
    exact, ours = Exact().acceptance(evidence), rule.acceptance(evidence)
    assert torch.equal(ours[0], exact[0])
    assert ours[1, :2].tolist() == [0.0, 0.0]
    assert exact[1, :2].tolist() == [1.0, 1.0]


def test_ngram_drafting_alone_is_refused():
    with pytest.raises(InvalidConfigError, match="point mass"):
        EASDConfig(drafting="ngram").drafting_for(has_assistant=True, deterministic=True)


def test_rounds_served_by_an_ngram_match_are_exact():
    model, rounds = tiny_llama(), []
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    model.generate(
        ids,
        assistant_model=noisy_copy(model),
        speculative_config=EASDConfig(drafting="hybrid", entropy_threshold=-1, overlap_threshold=0, length=3),
        round_callback=rounds.append,
        do_sample=False,
        max_new_tokens=40,
    )
    fired = {"ngram": 0, "model": 0}
    for round_ in rounds:
        if not round_.is_prefill and round_.source in fired:
            fired[round_.source] += int(sum(round_.events.get("easd_fired", torch.zeros(1))))
    sources = [round_.source for round_ in rounds]
    assert sources.count("ngram") > 2
    assert sources.count("model") > 2
    assert fired == {"ngram": 0, "model": sources.count("model")}


# --- through generate -----------------------------------------------------------------------------------------------


def decode(model, drafter, config, inputs, **options):
    torch.manual_seed(11)
    return model.generate(
        **inputs,
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=options.pop("max_new_tokens", 16),
        return_dict_in_generate=True,
        **options,
    )


NEVER = {
    "both": {"entropy_threshold": math.inf, "overlap_threshold": 0.0},
    "draft": {"entropy_threshold": 0.0, "draft_entropy_threshold": math.inf, "overlap_threshold": 0.0},
    "overlap": {"entropy_threshold": 0.0, "overlap_threshold": 1.01},
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "batching", "name"),
    [(1, "ragged", "both"), (1, "lockstep", "draft"), (3, "ragged", "overlap"), (3, "lockstep", "both")],
)
def test_thresholds_that_never_fire_give_the_exact_text_token_for_token(do_sample, batch_size, batching, name):
    model = tiny_llama(layers=1)
    shared = {"length": 4, "batching": batching, "on_drafter_error": "raise"}
    options = {"do_sample": do_sample, **({"temperature": 1.3, "top_k": 20} if do_sample else {})}
    inputs, drafter = prompts(batch_size), noisy_copy(model)
    exact = decode(model, drafter, ExactConfig(drafting="model", **shared), inputs, **options)
    easd = decode(model, drafter, EASDConfig(**NEVER[name], **shared), inputs, **options)
    assert torch.equal(easd.sequences, exact.sequences)
    assert easd.speculative_stats.num_accepted_tokens == exact.speculative_stats.num_accepted_tokens > 0
    assert all(easd.speculative_stats.events[name] == 0 for name in COUNTERS)
    on = decode(model, drafter, EASDConfig(entropy_threshold=0.5, overlap_threshold=0.0, **shared), inputs, **options)
    assert not torch.equal(on.sequences, exact.sequences)
    assert on.speculative_stats.events["easd_fired"] > 0


@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_the_rule_reads_untempered_logits(batching):
    """What it is shown in a run at temperature 2 with top-k: raw logits of both models beside the processed scores."""
    seen = []

    class Recording:
        lossless, needs_draft_logits, throws_dice = False, True, False

        def acceptance(self, evidence):
            seen.append(evidence)
            return Exact().acceptance(evidence)

        def replacement(self, evidence):
            return Exact().replacement(evidence)

        def count(self, evidence, outcome):
            return {}

    model, inputs = tiny_llama(layers=2), {"input_ids": torch.tensor([[3, 9, 4, 33, 7]])}
    drafter = noisy_copy(model)
    config = SpeculativeConfig(acceptance=Recording(), drafting="model", length=2, batching=batching)
    out = decode(model, drafter, config, inputs, do_sample=True, temperature=2.0, top_k=5, max_new_tokens=4)
    text = out.sequences[0].tolist()
    with torch.no_grad():
        raw, raw_draft = (each(torch.tensor([text[:6]])).logits[0, -1] for each in (model, drafter))
    first = seen[0].at(torch.tensor([0]))
    torch.testing.assert_close(first.target_logits[0, 0], raw, atol=1e-4, rtol=0)
    torch.testing.assert_close(first.draft_logits[0, 0], raw_draft, atol=1e-4, rtol=0)
    kept = raw.topk(5).indices
    torch.testing.assert_close(first.scores[0, 0, kept], raw[kept] / 2, atol=1e-4, rtol=0)
    assert int(first.scores.isfinite().sum()) == 5
    assert int((first.q > 0).sum()) == 5


def test_sampled_runs_follow_the_enumerated_law():
    """Three tokens: the prompt's own from `p`, one that the rule rejects and resamples, and one that has no draft."""
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=8, layers=1)
    drafter = noisy_copy(model, noise=0.5)
    prompt = [1, 2, 3, 1, 2]
    inputs = {"input_ids": torch.tensor([prompt])}
    options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_new_tokens": 3, "num_return_sequences": 6000}
    out = decode(model, drafter, EASDConfig(entropy_threshold=0.0, overlap_threshold=0.0), inputs, **options)
    assert out.speculative_stats.events["easd_fired"] == out.speculative_stats.num_draft_tokens == 6000

    def laws(lm, texts):
        with torch.no_grad():
            return (lm(torch.tensor(texts)).logits[:, -1].double() / 2).softmax(-1).numpy()

    pairs = [[*prompt, first, second] for first in range(8) for second in range(8)]
    p0, p2 = laws(model, [prompt])[0], laws(model, pairs).reshape(8, 8, 8)
    p1, q1 = (laws(lm, [[*prompt, first] for first in range(8)]) for lm in (model, drafter))
    fired = np.array([fired_law(p, q, "masked", "accepted") for p, q in zip(p1, q1, strict=True)])
    observed = np.zeros((8, 8, 8))
    np.add.at(observed, tuple(out.sequences[:, -3:].T.numpy()), 1)

    def p_value(second):
        expected = (6000 * p0[:, None, None] * second[:, :, None] * p2).ravel()
        rare = expected < 5
        cells = [np.append(each[~rare], each[rare].sum()) for each in (observed.ravel(), expected)]
        return chisquare(*cells).pvalue

    assert p_value(fired) > 1e-4
    assert p_value(p1) < 1e-20  # the target's own law, which this rule must not have
