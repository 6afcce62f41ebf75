"""SecureSD's guard: exact for the first tokens, the rule after them, through single laws and whole runs."""

import pytest
import torch

from hf_specdec import (
    CoSpecConfig,
    CSDConfig,
    EarlyExactGuard,
    EASDConfig,
    ExactConfig,
    InvalidConfigError,
    NucleusConfig,
    SpeculativeConfig,
)
from hf_specdec.acceptance import CSD, EASD, CorrectionMemory, Exact, LossyEps, Nucleus, TopK
from hf_specdec.drafters import DrafterBase, ScriptedDrafter
from hf_specdec.records import Draft
from tests.acceptance import joint_law, random_scores, target_law
from tests.acceptance.rules import ON
from tests.toys import noisy_copy, prompts, tiny_llama


WILD = Nucleus(1.0)  # accepts every draft


def tables(seed=3, depth=2):
    raw = random_scores(depth, 5, seed=seed)
    draft = [table + noise for table, noise in zip(raw, random_scores(depth - 1, 5, seed + 50), strict=False)]
    return raw, draft, [table.softmax(-1) for table in draft]


# --- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_the_first_tokens_follow_the_target_and_only_they(length, do_sample):
    """Drafts stand at generated tokens 0, 1 and 2; `L` of them are exact, so the marginal law of that many is."""
    raw, draft, laws = tables(depth=3)
    joint = joint_law(EarlyExactGuard(WILD, length), raw, laws, draft_logits=draft, do_sample=do_sample)
    target = target_law(raw, do_sample)
    for depth in range(1, 4):
        ours, exact = (law.flatten(depth).sum(-1) for law in (joint, target))
        assert (float((ours - exact).abs().max()) < 1e-12) == (depth <= length)


@pytest.mark.parametrize("name", sorted(ON))
def test_no_rule_reaches_a_guarded_token(name):
    raw, draft, laws = tables()
    exact = joint_law(Exact(), raw, laws, raw=raw, draft_logits=draft)
    guarded = joint_law(EarlyExactGuard(ON[name], 2), raw, laws, raw=raw, draft_logits=draft)
    assert torch.equal(guarded, exact)
    loose = joint_law(EarlyExactGuard(ON[name], 0), raw, laws, raw=raw, draft_logits=draft)
    assert torch.equal(loose, joint_law(ON[name], raw, laws, raw=raw, draft_logits=draft))


def test_the_prompt_is_not_counted():
    raw, draft, laws = tables()
    for prompt in ((0,), (0, 1, 2, 3)):
        joint = joint_law(EarlyExactGuard(WILD, 1), raw, laws, draft_logits=draft, prompt=prompt)
        marginal = joint.flatten(1).sum(-1)
        torch.testing.assert_close(marginal, raw[0].softmax(-1), atol=1e-12, rtol=0)
        assert float((joint - target_law(raw)).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "step"}, [0, 0, 0, 0, 1, 1]),
        ({"schedule": "step", "start": 0.25, "end": 0.75}, [0.25] * 4 + [0.75] * 2),
        ({"schedule": "linear"}, [0, 0.25, 0.5, 0.75, 1, 1]),
        ({"schedule": "power", "gamma": 2.0}, [0, 0.0625, 0.25, 0.5625, 1, 1]),
    ],
    ids=str,
)
def test_schedules_blend_the_two_acceptances(options, expected):
    guard = EarlyExactGuard(LossyEps(0.4), 4, **options)
    raw = [torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64).expand(*[3] * depth, 3) for depth in range(7)]
    seen = []

    class Spy:
        lossless, needs_draft_logits = False, False

        def acceptance(self, evidence):
            seen.append((guard.weight(evidence), guard.acceptance(evidence)))
            return guard.acceptance(evidence)

        def replacement(self, evidence):
            return guard.replacement(evidence)

    joint = joint_law(Spy(), raw, None, path=[1] * 6, do_sample=False)
    weight, acceptance = seen[0]
    torch.testing.assert_close(weight[0], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(acceptance[0], 0.4 * torch.tensor(expected, dtype=torch.float64))  # a mismatch
    assert float(joint.sum()) == pytest.approx(1.0)


def test_a_schedule_that_blends_needs_dice():
    assert not EarlyExactGuard(TopK(2)).throws_dice
    assert EarlyExactGuard(LossyEps(0.1)).throws_dice
    assert EarlyExactGuard(TopK(2), schedule="linear").throws_dice
    assert EarlyExactGuard(TopK(2), start=0.5).throws_dice


def test_it_says_about_itself_what_its_rule_says():
    for rule in (Exact(), TopK(2), EASD()):
        guard = EarlyExactGuard(rule)
        assert (guard.lossless, guard.needs_draft_logits) == (rule.lossless, rule.needs_draft_logits)


# --- whole runs -----------------------------------------------------------------------------------------------------


def decode(model, drafter, config, batch_size=1, tokens=12, **options):
    torch.manual_seed(4)
    return model.generate(
        **prompts(batch_size),
        assistant_model=drafter,
        speculative_config=config,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **({"do_sample": False} | options),
    )


@pytest.mark.parametrize(("batch_size", "batching"), [(1, "ragged"), (2, "ragged"), (2, "lockstep")])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_run_is_the_targets_own_for_the_first_tokens_exactly(length, batch_size, batching):
    """Greedy, with a drafter that is wrong everywhere and a rule that takes everything: the first foreign token is `L`."""
    model = tiny_llama(layers=1)
    plain = model.generate(**prompts(batch_size), do_sample=False, max_new_tokens=12)[:, 7:]
    script = [[(token + 1) % 63 + 1 for token in row] for row in plain.tolist()]
    config = SpeculativeConfig(
        acceptance=WILD, guard=length, drafting="model", length=4, batching=batching, on_drafter_error="raise"
    )
    out = decode(model, lambda settings: ScriptedDrafter(settings, script), config, batch_size)
    text = out.sequences[:, 7:]
    assert torch.equal(text[:, :length], plain[:, :length])
    assert bool((text[:, length] != plain[:, length]).all())


class _Attacker(DrafterBase):
    """Drafts as the target would go on, but for the second new token: there it drafts the runner-up."""

    def __init__(self, settings, model, columns):
        super().__init__(settings)
        self.model, self.columns = model, columns

    def propose(self, context, budget):
        text = context.tokens[0, : int(context.lengths[0])].tolist()
        drafted = []
        for _ in range(int(budget.max_tokens[0])):
            best, second = self.model(torch.tensor([text])).logits[0, -1].topk(2).indices.tolist()
            drafted.append(second if len(text) == self.columns + 1 else best)
            text.append(drafted[-1])
        return Draft(torch.tensor([drafted], dtype=torch.long), torch.tensor([len(drafted)]))


def test_a_prefix_attack_on_a_relaxed_rule_is_prevented():
    """The target refuses. A drafter flips the second token to the runner-up, which the rule lets pass; from there on the target
    itself goes on with another answer. Behind the guard the answer is the refusal to its end."""
    model = tiny_llama(layers=1)
    refusal = model.generate(**prompts(), do_sample=False, max_new_tokens=12)[0, 7:].tolist()
    prefix = torch.cat([prompts()["input_ids"][0], torch.tensor(refusal[:1])])
    flip = int(model(prefix[None]).logits[0, -1].topk(2).indices[1])
    flipped_prefix = torch.cat([prefix, torch.tensor([flip])])[None]
    answer = model.generate(flipped_prefix, do_sample=False, max_new_tokens=10)[0, 7:].tolist()
    assert answer[2:] != refusal[2:]

    def attacker(settings):
        return _Attacker(settings, model, columns=7)

    shared = {"acceptance": TopK(2), "drafting": "model", "length": 3, "on_drafter_error": "raise"}
    flipped = decode(model, attacker, SpeculativeConfig(**shared, guard=None))
    assert flipped.sequences[0, 7:].tolist() == answer
    kept = decode(model, attacker, SpeculativeConfig(**shared))
    assert kept.sequences[0, 7:].tolist() == refusal
    late = decode(model, attacker, SpeculativeConfig(**shared, guard=1))  # too short for this flip
    assert late.sequences[0, 7:].tolist() == answer


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_long_guard_gives_the_exact_run_and_counts_nothing(do_sample):
    model = tiny_llama(layers=1)
    drafter = noisy_copy(model, noise=0.3)
    shared = {"drafting": "model", "length": 4, "on_drafter_error": "raise"}
    exact = decode(model, drafter, ExactConfig(**shared), do_sample=do_sample)
    for rule in (TopK(5), EASD(0.0, 0.0, 0.0)):
        out = decode(model, drafter, SpeculativeConfig(acceptance=rule, guard=99, **shared), do_sample=do_sample)
        assert torch.equal(out.sequences, exact.sequences)
        counted = {
            name: count for name, count in out.speculative_stats.events.items() if name != "tokenizers_unchecked"
        }
        assert sum(counted.values()) == 0
        assert counted
        assert not out.speculative_stats.lossless


def test_a_guarded_memory_learns_from_the_first_token_on():
    model = tiny_llama(layers=1)
    memories = CorrectionMemory(), CorrectionMemory()
    for memory, guard in zip(memories, (99, None), strict=True):
        config = CSDConfig(
            memory=memory, guard=guard, frequency_threshold=1e9, drafting="model", length=4, on_drafter_error="raise"
        )
        decode(model, noisy_copy(model, noise=0.3), config)
    assert memories[0] == memories[1]
    assert len(memories[0]) > 0


# --- configs --------------------------------------------------------------------------------------------------------


def test_relaxed_rules_are_guarded_unless_the_user_says_otherwise():
    assert NucleusConfig().rule == EarlyExactGuard(Nucleus(), 2)
    assert CSDConfig().rule == EarlyExactGuard(CSD(), 2)
    assert SpeculativeConfig(acceptance="topk").rule == EarlyExactGuard(TopK(), 2)
    assert SpeculativeConfig(acceptance=TopK(3), guard=5).rule == EarlyExactGuard(TopK(3), 5)
    assert isinstance(CoSpecConfig().rule, EarlyExactGuard)
    for config in (NucleusConfig(guard=None), SpeculativeConfig(acceptance=Nucleus(), guard=None)):
        assert config.rule == Nucleus()
    own = EarlyExactGuard(TopK(), 3, schedule="linear")
    assert SpeculativeConfig(acceptance=own).rule == own
    assert EASDConfig().rule == SpeculativeConfig(acceptance=EASD()).rule == EASD()
    assert EASDConfig(guard=2).rule == EarlyExactGuard(EASD(), 2)
    assert SpeculativeConfig(guard=4).rule == SpeculativeConfig().rule == Exact()


def test_a_guard_is_given_as_such_and_goes_around_the_configs_own_rule():
    linear = EarlyExactGuard(length=5, schedule="linear")
    for config, rule in ((NucleusConfig, Nucleus()), (CSDConfig, CSD()), (EASDConfig, EASD())):
        assert config(guard=EarlyExactGuard(length=3)).rule == config(guard=3).rule == EarlyExactGuard(rule, 3)
        assert config(guard=linear).rule == EarlyExactGuard(rule, 5, schedule="linear")
    assert SpeculativeConfig(acceptance="topk", guard=linear).rule == EarlyExactGuard(TopK(), 5, schedule="linear")
    assert SpeculativeConfig(guard=linear).rule == Exact()
    with pytest.raises(InvalidConfigError, match="leave its rule out"):
        NucleusConfig(guard=EarlyExactGuard(TopK(), 3))


@pytest.mark.parametrize("guard", [-1, 1.5, True, "always"])
def test_a_guard_that_is_no_number_of_tokens_is_refused(guard):
    for config in (NucleusConfig, SpeculativeConfig, CSDConfig, CoSpecConfig, EASDConfig):
        with pytest.raises(InvalidConfigError, match="guard must be a number of tokens"):
            config(guard=guard)


@pytest.mark.parametrize(
    "options", [{"length": -1}, {"length": 1.5}, {"schedule": "cosine"}, {"start": 2.0}, {"end": -1.0}, {"gamma": 0.0}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        EarlyExactGuard(TopK(), **options)
    with pytest.raises(InvalidConfigError, match="guarded already"):
        EarlyExactGuard(EarlyExactGuard(TopK()))
