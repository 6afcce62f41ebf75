"""What must hold for every acceptance rule: its off-switch, its law, and what no rule may ever emit."""

import dataclasses

import numpy as np
import pytest
import torch

from hf_specdec import ExactConfig, SpeculativeConfig
from hf_specdec.acceptance import ACCEPTANCE, Exact, Mentored
from hf_specdec.acceptance.relaxed import CoinRule, LawRule, RelaxedRule, SetRule
from hf_specdec.laws import total_variation
from hf_specdec.records import Evidence, choice_law
from hf_specdec.verify import RandomStreams, verify
from tests.acceptance import joint_law, place_of, random_scores, target_law
from tests.acceptance.rules import OFF, ON
from tests.toys import noisy_copy, prompts, tiny_llama


NAMES = sorted(ON)
BANNED = float("-inf")
OF_KIND = {
    kind: [name for name in NAMES if isinstance(ON[name], kind)] for kind in (CoinRule, SetRule, LawRule, RelaxedRule)
}
# Sets that depend on the draft's other tokens; that of CSD is no `SetRule`, since it learns.
POINTWISE = [name for name in [*OF_KIND[SetRule], "csd"] if name not in ("asd", "fly")]


def tables(seed, depth=2, vocab_size=6):
    """Target tables of `depth + 1` levels and draft tables, which are the target's with noise."""
    raw = random_scores(depth, vocab_size, seed=seed)
    noise = random_scores(depth - 1, vocab_size, seed=seed + 100, spread=0.8)
    return raw, [table + other for table, other in zip(raw, noise, strict=False)]


def laws_of(draft):
    return [table.softmax(-1) for table in draft]


def every_token(raw, draft, scores=None, do_sample=True, valid=True):
    """One row per token of the vocabulary, which is what it drafts at its only position."""
    vocab_size = raw.shape[-1]
    tokens = torch.arange(vocab_size)[:, None]

    def rows(table):
        return table.expand(vocab_size, 1, -1)

    return Evidence(
        tokens,
        torch.full_like(tokens, valid, dtype=torch.bool),
        rows(raw if scores is None else scores),
        rows(raw),
        do_sample,
        q=rows(draft.softmax(-1)),
        draft_logits=rows(draft),
        place=place_of(tokens),
    )


def emitted(rule, evidence):
    """The law of the token at that position, and the parts it is made of."""
    q = evidence.q[0, 0]
    acceptance = rule.acceptance(evidence)[:, 0]
    return q * acceptance + (q * (1 - acceptance)) @ rule.replacement(evidence), acceptance, q, evidence.p[0, 0]


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_names_every_rule():
    expected = """exact easd csd nucleus cospec lenience lossy_eps ensemble ears typical topk relaxed_thinking mars fsd fly
    cascade_chow cascade_diff cascade_opt cascade_token asd mentored judge bild"""
    assert sorted(ACCEPTANCE) == sorted(expected.split()) == sorted(["exact", *NAMES])
    assert {name: ACCEPTANCE[name] for name in NAMES} == {name: type(ON[name]) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_frozen_final_and_not_lossless(name):
    rule = ON[name]
    assert not rule.lossless
    assert type(rule).__final__
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, dataclasses.fields(rule)[0].name, None)


@pytest.mark.parametrize("name", OF_KIND[RelaxedRule])
def test_only_rules_that_say_so_throw_dice_under_greedy_decoding(name):
    fractional = False
    for seed in range(6):
        raw, draft = (each[0] for each in tables(seed))
        evidence = dataclasses.replace(every_token(raw, draft, do_sample=False), q=None)
        acceptance = ON[name].acceptance(evidence)
        fractional |= bool(((acceptance > 0) & (acceptance < 1)).any())
    assert fractional == ON[name].throws_dice


# --- off-switches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_switched_off_a_rule_has_the_exact_law_bit_for_bit(name, do_sample):
    raw, draft = tables(3)
    scores = [table / 0.7 for table in raw]
    for laws, path in ((laws_of(draft), None), (None, [2, 4])):
        options = {"do_sample": do_sample, "path": path, "raw": raw, "draft_logits": draft if laws else None}
        joint = joint_law(OFF[name], scores, laws, **options)
        assert torch.equal(joint, joint_law(Exact(), scores, laws, **options))


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", OF_KIND[RelaxedRule])
def test_switched_on_it_has_another_law_or_text(name, do_sample):
    distances = []
    for raw, draft in map(tables, range(3, 9)):
        joint = joint_law(ON[name], raw, laws_of(draft), raw=raw, draft_logits=draft, do_sample=do_sample)
        distances.append(float((joint - target_law(raw, do_sample)).abs().max()))
    exact_when_greedy = {"lenience", "mentored"}
    assert (max(distances) > 1e-4) == (do_sample or name not in exact_when_greedy)


def decode(model, drafter, config, do_sample, batch_size, tokens=9):
    torch.manual_seed(5)
    options = {"do_sample": True, "temperature": 1.2, "top_k": 30} if do_sample else {"do_sample": False}
    return model.generate(
        **prompts(batch_size),
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **options,
    )


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama(layers=1)
    return model, noisy_copy(model, noise=0.3)


@pytest.fixture(scope="module")
def exact_texts(pair):
    texts = {}
    for do_sample, batching in ((True, "ragged"), (False, "lockstep")):
        config = ExactConfig(drafting="model", length=4, batching=batching, on_drafter_error="raise")
        texts[do_sample] = decode(*pair, config, do_sample, 2)
    return texts


@pytest.mark.parametrize(("do_sample", "batching"), [(True, "ragged"), (False, "lockstep")])
@pytest.mark.parametrize("name", NAMES)
def test_switched_off_a_run_is_the_exact_run(name, do_sample, batching, pair, exact_texts):
    config = SpeculativeConfig(
        acceptance=OFF[name], drafting="model", length=4, batching=batching, on_drafter_error="raise"
    )
    out, exact = decode(*pair, config, do_sample, 2), exact_texts[do_sample]
    assert torch.equal(out.sequences, exact.sequences)
    assert out.speculative_stats.num_accepted_tokens == exact.speculative_stats.num_accepted_tokens > 0
    assert out.speculative_stats.events["relaxed_accepted"] == 0


# --- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", POINTWISE)
def test_a_set_rule_departs_by_the_drafts_excess_in_the_set(name, seed):
    raw, draft = (each[0] for each in tables(seed))
    evidence = every_token(raw, draft)
    rule = ON[name]
    inside = (rule.rescues if name == "csd" else rule.members)(evidence)[:, 0]
    law, acceptance, q, p = emitted(rule, evidence)
    torch.testing.assert_close(acceptance, torch.where(inside, 1.0, (p / q).clamp(max=1)), atol=1e-15, rtol=0)
    excess = (q - p).clamp(min=0)[inside].sum()
    assert abs(float(total_variation(law, p) - excess)) < 1e-12
    assert abs(float(law.sum()) - 1) < 1e-12


REFERENCE_COINS = {
    "lenience": lambda p, q: np.minimum(1, p / (0.5 * q)),
    "lossy_eps": lambda p, q: np.minimum(1, p / q + 0.3),
    "ears": lambda p, q: np.minimum(1, p / q + 0.5 * (1 - p.max())),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in OF_KIND[CoinRule] if name in REFERENCE_COINS])
def test_a_coin_rule_emits_accepted_drafts_and_the_exact_residual(name, seed):
    raw, draft = (each[0] for each in tables(seed))
    p, q = raw.softmax(-1).numpy(), draft.softmax(-1).numpy()
    coin = REFERENCE_COINS[name](p, q)
    excess = np.clip(p - q, 0, None)
    expected = q * coin + (1 - (q * coin).sum()) * excess / excess.sum()
    law = emitted(ON[name], every_token(raw, draft))[0].numpy()
    assert np.abs(law - expected).max() < 1e-12
    assert np.abs(law - p).max() > 1e-3


def token_cascade(p, q, deferred):
    return q * ~deferred + p * (q * deferred).sum()


REFERENCE_LAWS = {
    "ensemble": lambda p, q: 0.6 * p + 0.4 * q,
    "cascade_chow": lambda p, q: p if q.max() < 0.4 else q,
    "cascade_diff": lambda p, q: p if q.max() < p.max() - 0.2 else q,
    "cascade_opt": lambda p, q: p if q.max() < p.max() - 0.9 * np.abs(p - q).sum() / 2 else q,
    "cascade_token": lambda p, q: token_cascade(p, q, p < 0.25 * p.max()),
}


@pytest.mark.parametrize("name", sorted(REFERENCE_LAWS))
def test_a_law_rule_emits_its_mixture(name):
    kinds = set()
    for seed in range(12):
        raw, draft = (each[0] for each in tables(seed))
        p, q = raw.softmax(-1).numpy(), draft.softmax(-1).numpy()
        expected = REFERENCE_LAWS[name](p, q)
        law = emitted(ON[name], every_token(raw, draft))[0].numpy()
        assert np.abs(law - expected).max() < 1e-12
        kinds.add("target" if np.array_equal(expected, p) else "draft" if np.array_equal(expected, q) else "mixture")
    assert kinds == ({"target", "draft"} if name in ("cascade_chow", "cascade_diff", "cascade_opt") else {"mixture"})


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_each_token_cascade_emits_its_law(version):
    for seed in range(6):
        raw, draft = (each[0] for each in tables(seed))
        p, q = raw.softmax(-1).numpy(), draft.softmax(-1).numpy()
        deferred = {"v1": q < p.max() - 0.3, "v2": p < p.max() - 0.3, "v3": p < 0.7 * p.max()}[version]
        law = emitted(dataclasses.replace(ON["cascade_token"], alpha=0.3, version=version), every_token(raw, draft))[0]
        assert np.abs(law.numpy() - token_cascade(p, q, deferred)).max() < 1e-12


@pytest.mark.parametrize("bound", [0.02, 0.1, 0.5])
def test_mentored_decoding_uses_its_divergence_to_accept_more(bound):
    for seed in range(6):
        raw, draft = (each[0] for each in tables(seed))
        law, acceptance, q, p = emitted(Mentored(bound, 20), every_token(raw, draft))
        divergence = float((p * (p / law).log()).sum())
        needed = float((p * (p / q).log()).sum())
        assert divergence <= bound + 1e-12
        assert divergence > 0.95 * min(bound, needed)
        assert float((q * acceptance).sum()) > float(torch.minimum(p, q).sum())
        # The published form of the law, with alpha and beta read off it.
        alpha, beta = (p / law).min(), (p / law).max()
        torch.testing.assert_close(law, torch.minimum(p / alpha, torch.maximum(q, p / beta)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_banned_token_is_never_emitted(name, do_sample):
    """Not even where the drafter proposes it and the untempered logits of both love it."""
    raw, draft = tables(9)
    for table in (*raw, *draft):
        table[..., 2] = 3.0
    scores = [table.clone() for table in raw]
    for table in scores:
        table[..., 2] = BANNED
    joint = joint_law(ON[name], scores, laws_of(draft), raw=raw, draft_logits=draft, do_sample=do_sample)
    assert float(joint[2].sum() + joint[:, 2].sum() + joint[:, :, 2].sum()) == 0
    assert float(joint.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["equal laws", "T=1e-6", "one candidate"])
def test_degenerate_laws_make_no_nan_and_keep_all_mass(name, case):
    raw, draft = tables(4)
    scores = {
        "equal laws": raw,
        "T=1e-6": [table / 1e-6 for table in raw],
        "one candidate": [torch.full_like(t, BANNED).scatter(-1, t.argmax(-1, True), t.amax(-1, True)) for t in raw],
    }[case]
    drafted = raw[:2] if case == "equal laws" else draft
    joint = joint_law(ON[name], scores, laws_of(drafted), raw=raw, draft_logits=drafted)
    assert bool(joint.isfinite().all())
    assert float(joint.sum()) == pytest.approx(1.0, abs=1e-9)
    if case == "equal laws" and name not in ("easd", "cascade_token"):  # these two mean to reshape an agreed law
        assert float((joint - target_law(scores)).abs().max()) < 1e-9
    if case == "one candidate":
        assert float((joint - target_law(scores)).abs().max()) < 1e-12


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"easd", "ensemble"}))
def test_at_a_temperature_near_zero_a_rule_is_its_greedy_self(name, seed):
    """Not so the ensemble, which mixes untempered laws in greedy decoding as transformers does, and EASD, which masks a token
    that has all the probability."""
    raw, draft = tables(seed)
    points = laws_of([table / 1e-6 for table in draft])
    cold = joint_law(ON[name], [table / 1e-6 for table in raw], points, raw=raw, draft_logits=draft)
    greedy = joint_law(ON[name], raw, points, raw=raw, draft_logits=draft, do_sample=False)
    assert float((cold - greedy).abs().max()) < 1e-9


# --- batches --------------------------------------------------------------------------------------------------------


def batch_evidence(do_sample, width=5, vocab_size=8, lengths=(5, 2, 0, 4)):
    generator = torch.Generator().manual_seed(1)
    raw = 1.5 * torch.randn(len(lengths), width + 1, vocab_size, generator=generator)
    draft = raw[:, :width] + 0.4 * torch.randn(len(lengths), width, vocab_size, generator=generator)
    tokens = draft.argmax(-1)
    tokens[:, 1] = raw[:, 1].topk(2).indices[..., 1]
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    evidence = Evidence(
        tokens, valid, raw[:, :width], raw[:, :width], do_sample,
        q=draft.softmax(-1) if do_sample else None, draft_logits=draft, place=place_of(tokens),
    )  # fmt: skip
    return evidence, raw[torch.arange(len(lengths)), torch.tensor(lengths)]


def row_of(evidence, row, width):
    def cut(values):
        return None if values is None else values[row : row + 1, :width]

    return Evidence(
        cut(evidence.tokens), cut(evidence.valid), cut(evidence.scores), cut(evidence.target_logits),
        evidence.do_sample, cut(evidence.q), cut(evidence.draft_logits), place_of(cut(evidence.tokens)),
    )  # fmt: skip


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_lengths_are_judged_as_if_alone(name, do_sample):
    evidence, bonus = batch_evidence(do_sample)
    together = ON[name].acceptance(evidence)
    for row, length in enumerate((5, 2, 0, 4)):
        if length:
            alone = ON[name].acceptance(row_of(evidence, row, length))
            torch.testing.assert_close(together[row, :length], alone[0], atol=1e-6, rtol=0)
    verdict = verify(ON[name], evidence, bonus, RandomStreams(4), torch.ones(4, dtype=torch.bool))
    assert bool((verdict.num_accepted <= torch.tensor([5, 2, 0, 4])).all())


@pytest.mark.parametrize("name", NAMES)
def test_position_by_position_a_rule_says_the_same(name):
    """In lockstep a rule is shown one position, with the whole draft beside it."""
    whole, _ = batch_evidence(False)
    expected = ON[name].acceptance(whole)
    for position in range(5):
        part = dataclasses.replace(whole.at(torch.full((4,), position)), whole=whole, first=position)
        torch.testing.assert_close(ON[name].acceptance(part)[:, 0], expected[:, position])


@pytest.mark.parametrize("name", [name for name in NAMES if ON[name].needs_draft_logits and name != "cospec"])
def test_ngram_rows_are_judged_exactly(name):
    raw, _ = tables(3)
    joint = joint_law(ON[name], raw, None, path=[1, 4])
    assert torch.equal(joint, joint_law(Exact(), raw, None, path=[1, 4]))
    sure = [torch.full((6,) * (d + 1), BANNED).index_fill(-1, torch.tensor([t]), 0.0) for d, t in enumerate([1, 4])]
    joint = joint_law(ON[name], raw, None, path=[1, 4], draft_logits=sure)  # beside a modelled row of the batch
    assert torch.equal(joint, joint_law(Exact(), raw, None, path=[1, 4]))


@pytest.fixture(scope="module")
def half_pair():
    model = tiny_llama(layers=1).bfloat16()
    return model, tiny_llama(layers=1, vocab_size=72).bfloat16()


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_a_padded_vocabulary(name, half_pair):
    """Of either model. Unguarded, so that the rule decides each token; switched off it is the exact run to the token."""
    shared = {"drafting": "model", "length": 3, "on_drafter_error": "raise"}
    for model, drafter in (half_pair, half_pair[::-1]):
        config = SpeculativeConfig(acceptance=ON[name], guard=None, **shared)
        out = decode(model, drafter, config, True, 3, tokens=6)
        assert out.sequences.shape == (3, 13)
        assert int(out.sequences.max()) < model.config.vocab_size
        assert out.speculative_stats.num_verified_tokens > 0
        assert not out.speculative_stats.lossless
        off = decode(model, drafter, SpeculativeConfig(acceptance=OFF[name], guard=None, **shared), True, 3, tokens=6)
        exact = decode(model, drafter, ExactConfig(**shared), True, 3, tokens=6)
        assert torch.equal(off.sequences, exact.sequences)


def test_what_was_relaxed_is_counted(pair):
    """Greedy: a relaxed token is a kept draft that is not the target's argmax, found again without any cache."""
    model, drafter = pair
    config = SpeculativeConfig(acceptance=ON["topk"], drafting="model", length=4, on_drafter_error="raise", guard=None)
    out = decode(model, drafter, config, False, 1, tokens=20)
    text = out.sequences
    wanted = choice_law(model(text).logits, False).argmax(-1)[:, 6:-1]
    changed = int((text[:, 7:] != wanted).sum())
    assert out.speculative_stats.events["relaxed_accepted"] == changed > 0
