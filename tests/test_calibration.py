"""`calibrate_easd` against a brute-force reference that holds all logits and asks the rule itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_specdec import EASDConfig, ExactConfig, InvalidConfigError, teacher_forcing
from hf_specdec.calibration import calibrate_easd
from hf_specdec.compatibility import fit_vocabulary
from tests.toys import noisy_copy, state_of, tiny_llama


MODEL = tiny_llama()
DRAFT = noisy_copy(MODEL)
TEXTS = [torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length)) for length in (22, 9, 40)]
CONFIG = EASDConfig(overlap_threshold=0.4)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """The texts are longer than one pass, and passes longer than one step of the statistics."""
    monkeypatch.setattr(teacher_forcing, "_POSITIONS_PER_PASS", 7)
    monkeypatch.setattr(teacher_forcing, "_POSITIONS_PER_STEP", 3)


def reference(target, draft, texts, config):
    """All logits at once, without a cache."""
    with torch.no_grad():
        ours = torch.cat([target(text[None], use_cache=False).logits[0, :-1] for text in texts]).double()
        theirs = torch.cat([draft(text[None], use_cache=False).logits[0, :-1] for text in texts]).double()
    theirs = fit_vocabulary(theirs, ours.shape[-1])
    p, q = ours.softmax(-1).numpy(), theirs.softmax(-1).numpy()

    def share(target_threshold, draft_threshold):
        rule = replace(config, target_entropy_threshold=target_threshold, draft_entropy_threshold=draft_threshold).rule
        fires = rule.fires(ours, theirs, torch.full(ours.shape[:1], ours.shape[-1]))
        return float(fires.double().mean()), float((fires & (ours.argmax(-1) == theirs.argmax(-1))).double().mean())

    def entropies(law):
        with np.errstate(divide="ignore", invalid="ignore"):
            return -np.nansum(law * np.log(law), -1)

    return entropies(p), entropies(q), p, q, share


def test_every_figure_is_that_of_the_reference():
    found = calibrate_easd(MODEL, DRAFT, TEXTS, percentile=80, config=CONFIG)
    ours, theirs, p, q, share = reference(MODEL, DRAFT, TEXTS, CONFIG)
    assert (found.num_texts, found.num_positions) == (3, 21 + 8 + 39)
    assert found.target_entropy_threshold == pytest.approx(np.percentile(ours, 80), abs=1e-4)
    assert found.draft_entropy_threshold == pytest.approx(np.percentile(theirs, 80), abs=1e-4)
    assert found.target_quantiles == pytest.approx(
        {each: np.quantile(ours, each) for each in (0.5, 0.75, 0.9, 0.95, 0.98, 0.99)}, abs=1e-4
    )
    assert found.draft_quantiles == pytest.approx(
        {each: np.quantile(theirs, each) for each in (0.5, 0.75, 0.9, 0.95, 0.98, 0.99)}, abs=1e-4
    )
    assert found.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert found.expected_acceptance == pytest.approx(np.minimum(p, q).sum(-1).mean(), abs=1e-5)
    tops = [np.argsort(-law, -1)[:, :5] for law in (p, q)]
    overlap = [len(set(left) & set(right)) / 5 for left, right in zip(*tops, strict=True)]
    assert found.overlap == pytest.approx(np.mean(overlap), abs=1e-6)
    assert len({(each.fires, each.fires_aligned) for each in found.grid}) > 2
    for each in (*found.grid, found.chosen):
        thresholds = each.target_entropy_threshold, each.draft_entropy_threshold
        assert (each.fires, each.fires_aligned) == pytest.approx(share(*thresholds)), thresholds


def test_the_config_is_ready():
    base = EASDConfig(overlap_threshold=0.4, top_n=7, length=3)
    found = calibrate_easd(MODEL, DRAFT, TEXTS, config=base)
    assert found.config == replace(
        base,
        target_entropy_threshold=found.target_entropy_threshold,
        draft_entropy_threshold=found.draft_entropy_threshold,
    )
    out = MODEL.generate(
        TEXTS[0][None], assistant_model=DRAFT, speculative_config=found.config, max_new_tokens=4, do_sample=False
    )
    assert out.shape[1] == len(TEXTS[0]) + 4


@pytest.mark.parametrize("options", [{"entropy_base": 2.0}, {"entropy_kind": "normalized"}, {"entropy_kind": "topk"}])
def test_entropies_are_those_the_rule_measures(options):
    config = EASDConfig(overlap_threshold=0.0, **options)
    found = calibrate_easd(MODEL, DRAFT, TEXTS, percentile=60, config=config)
    *_, share = reference(MODEL, DRAFT, TEXTS, config)
    assert 0 < found.chosen.fires < 1
    assert found.chosen.fires == pytest.approx(share(found.target_entropy_threshold, found.draft_entropy_threshold)[0])


def test_a_model_against_itself():
    found = calibrate_easd(MODEL, MODEL, TEXTS)
    assert (found.agreement, found.overlap) == (1.0, 1.0)
    assert found.expected_acceptance == pytest.approx(1.0)
    assert found.target_quantiles == found.draft_quantiles


def test_at_the_largest_entropy_the_rule_never_fires():
    assert calibrate_easd(MODEL, DRAFT, TEXTS, percentile=100).chosen.fires == 0.0
    assert calibrate_easd(MODEL, MODEL, TEXTS, percentile=0).chosen.fires > 0.9


@pytest.mark.parametrize(("target_size", "draft_size"), [(64, 72), (72, 64)])
def test_padded_vocabularies(target_size, draft_size):
    target, draft = tiny_llama(vocab_size=target_size), tiny_llama(seed=2, vocab_size=draft_size)
    found = calibrate_easd(target, draft, TEXTS, config=CONFIG, percentile=70)
    ours, theirs, p, q, share = reference(target, draft, TEXTS, CONFIG)
    assert found.target_entropy_threshold == pytest.approx(np.percentile(ours, 70), abs=1e-4)
    assert found.draft_entropy_threshold == pytest.approx(np.percentile(theirs, 70), abs=1e-4)
    assert found.expected_acceptance == pytest.approx(np.minimum(p, q).sum(-1).mean(), abs=1e-5)
    thresholds = found.target_entropy_threshold, found.draft_entropy_threshold
    assert (found.chosen.fires, found.chosen.fires_aligned) == pytest.approx(share(*thresholds))


def test_tokens_that_the_draft_cannot_embed_are_read():
    target = tiny_llama(vocab_size=72)
    assert calibrate_easd(target, MODEL, [torch.tensor([1, 70, 71, 3])]).num_positions == 3


class Letters:
    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) % 62 + 2 for letter in text]}


def test_texts_prompts_and_progress():
    calls = []
    texts = ["abcdef", ("abc", "def"), "a", ("abc", "")]
    found = calibrate_easd(MODEL, DRAFT, texts, tokenizer=Letters(), progress=lambda *a: calls.append(a))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert found.num_positions == 6 + 3 + 1
    whole = torch.tensor(Letters()("abcdef")["input_ids"])
    ours, *_ = reference(MODEL, DRAFT, [whole], CONFIG)
    answer = calibrate_easd(MODEL, DRAFT, [("abc", "def")], tokenizer=Letters(), percentile=100)
    assert answer.target_entropy_threshold == pytest.approx(ours[-3:].max(), abs=1e-4)


def test_long_texts_are_cut():
    assert calibrate_easd(MODEL, DRAFT, TEXTS, max_tokens=10).num_positions == 9 + 8 + 9


def test_no_pass_computes_more_logits_than_fit():
    widths = []
    handles = [
        model.register_forward_hook(lambda module, args, output: widths.append(output.logits.shape[1]))
        for model in (MODEL, DRAFT)
    ]
    try:
        calibrate_easd(MODEL, DRAFT, TEXTS)
    finally:
        for handle in handles:
            handle.remove()
    assert max(widths) == 7


def test_the_models_stay_as_they_were():
    before = state_of(MODEL)
    calibrate_easd(MODEL, DRAFT, TEXTS[:1])
    after = state_of(MODEL)
    assert before[:2] + before[3:] == after[:2] + after[3:]
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"percentile": 101}, "percentile"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"texts": []}, "no position"),
        ({"texts": [torch.tensor([4])]}, "no position"),
        ({"texts": ["abc"]}, "pass tokenizer"),
        ({"texts": [("abc", "def")]}, "pass tokenizer"),
        ({"texts": [torch.ones(2, 2, dtype=torch.long)]}, "one row"),
        ({"texts": [torch.ones(2)]}, "one row"),
        ({"config": ExactConfig()}, "expected an EASDConfig"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    with pytest.raises(InvalidConfigError, match=message):
        calibrate_easd(MODEL, DRAFT, **({"texts": TEXTS} | arguments))


def test_nan_is_no_threshold():
    broken = tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    with pytest.raises(InvalidConfigError, match="NaN"):
        calibrate_easd(broken, DRAFT, TEXTS)


def test_plain_values_and_words():
    found = calibrate_easd(MODEL, DRAFT, TEXTS, percentile=90)
    values = json.loads(json.dumps(found.to_dict()))
    assert values["target_quantiles"]["0.95"] == found.target_quantiles[0.95]
    assert EASDConfig.from_dict(values["config"]) == found.config
    assert values["chosen"]["fires"] == found.chosen.fires
    assert len(values["grid"]) == len(found.grid)
    assert f"at the 90th percentile: target {found.target_entropy_threshold:.3f}" in found.summary()
