"""RCSD's losses against enumeration and hand computation."""

import itertools
from dataclasses import replace

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import DPOLoss, DraftedRounds, EALLoss, GRPOLoss, NearReferenceLoss, PairLoss, Unrolled
from hf_specdec.training.losses.grpo import relative_advantages
from hf_specdec.training.losses.windows import Windows, sample_windows
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import roll_out
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import observe
from hf_specdec.training.trainer import train
from hf_specdec.training.unroll import unroll
from tests.networks import drafter_for, small_target
from tests.training.test_trainer import sample


STEPS, VOCAB = 3, 5


def chain(*, steps=STEPS, rows=1, columns=4, vocab=VOCAB, ids=None, seed=0, scale=1.0):
    """Logits whose texts are the target's greedy ones."""
    generator = torch.Generator().manual_seed(seed)

    def logits(size):
        return [scale * torch.randn(rows, columns, size, generator=generator) for _ in range(steps)]

    target, size = logits(vocab), vocab if ids is None else len(ids)
    return Unrolled(
        [each.requires_grad_() for each in logits(size)],
        target,
        [torch.ones(rows, columns, dtype=torch.bool)] * steps,
        [each.argmax(-1) for each in target],
        None if ids is None else torch.tensor(ids),
        reference_logits=logits(size),
        seeds=list(range(rows)),
    )


def gradients(total, unrolled):
    return torch.autograd.grad(total, list(unrolled.student_logits))


def windows_of(unrolled, drafts, temperature=1.0):
    """The windows `(group, K)`, tokens of the draft vocabulary, at the only column of the only text."""
    drawn = torch.tensor(drafts).T[:, :, None, None]
    tokens = drawn if unrolled.target_ids is None else unrolled.target_ids[drawn]
    best = torch.stack([each.argmax(-1) for each in unrolled.target_logits])
    laws = torch.stack([(each.detach() / temperature).softmax(-1) for each in unrolled.student_logits])
    ids = torch.arange(laws.shape[-1]) if unrolled.target_ids is None else unrolled.target_ids
    odds = (laws * (ids == best[..., None])).sum(-1)
    return Windows(drawn, tokens == best[:, None], torch.stack(list(unrolled.masks)), odds)


def test_windows_have_the_drafters_law():
    unrolled = chain(steps=1, columns=20_000)
    student = [unrolled.student_logits[0][:, :1].detach().expand(-1, 20_000, -1)]
    windows = sample_windows(replace(unrolled, student_logits=student), 2, temperature=0.7)
    found = torch.bincount(windows.drafts.flatten(), minlength=VOCAB) / windows.drafts.numel()
    torch.testing.assert_close(found, (student[0][0, 0] / 0.7).softmax(-1), atol=0.015, rtol=0)


def test_a_text_draws_the_same_windows_in_any_batch_and_others_with_another_seed():
    unrolled = chain(rows=3)
    whole = sample_windows(unrolled, 4, 1.0)
    last = replace(
        unrolled,
        **{
            name: [each[2:] for each in getattr(unrolled, name)]
            for name in ("student_logits", "target_logits", "masks", "tokens")
        },
        seeds=[2],
    )
    assert torch.equal(sample_windows(last, 4, 1.0).drafts, whole.drafts[:, :, 2:])
    assert not torch.equal(sample_windows(replace(last, seeds=[3]), 4, 1.0).drafts, whole.drafts[:, :, 2:])


def test_rewards_stop_at_the_first_rejection_and_windows_reach_one_further():
    unrolled = chain(columns=1)
    best = [int(each) for each in unrolled.tokens]
    wrong = [(token + 1) % VOCAB for token in best]
    drafts = [best, [best[0], wrong[1], best[2]], [wrong[0], best[1], best[2]], [best[0], best[1], wrong[2]]]
    windows = windows_of(unrolled, drafts)
    torch.testing.assert_close(windows.rewards.flatten(), torch.tensor([3, 1, 0, 2]) / 3)
    reached = [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert windows.reached[..., 0, 0].T.int().tolist() == reached


def test_advantages_have_no_mean_and_one_spread_and_vanish_in_equal_groups():
    advantages = relative_advantages(torch.tensor([[0.0, 0.5], [1.0, 0.5], [0.5, 0.5]]))
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, 1.0, 0.0]) * (1.5**0.5), atol=1e-3, rtol=0)
    assert advantages[:, 1].abs().max() == 0


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_with_credit_by_window_is_that_of_the_formula(masked, monkeypatch):
    unrolled = chain(columns=1)
    best = [int(each) for each in unrolled.tokens]
    wrong = [(token + 2) % VOCAB for token in best]
    drafts = [best, [best[0], wrong[1], best[2]], [wrong[0], best[1], best[2]]]
    windows = windows_of(unrolled, drafts)
    monkeypatch.setattr("hf_specdec.training.losses.grpo.sample_windows", lambda *args: windows)
    loss = GRPOLoss(group_size=3, credit="window", temperature=1.0, masked=masked, kl_weight=0.0, anchor_weight=0.0)
    mine = gradients(loss(unrolled).total, unrolled)
    rewards = torch.tensor([1.0, 1 / 3, 0.0])
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
    log_q = [each.log_softmax(-1)[0, 0] for each in unrolled.student_logits]
    counted = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)] if masked else [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert advantages[1] < 0
    expected = -sum(advantages[g] * log_q[step][drafts[g][step]] for g, step in counted) / 3
    for one, other in zip(mine, gradients(expected, unrolled), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("trained", [STEPS, 2])
@pytest.mark.parametrize("ids", [None, [2, 3, 1]])  # the target's second choice is not in the draft vocabulary
def test_over_all_windows_the_gradient_is_that_of_the_expected_length(ids, trained, temperature, masked, monkeypatch):
    unrolled = chain(columns=1, vocab=4, ids=ids, seed=4)
    assert ids is None or [int(each) in ids for each in unrolled.tokens] == [True, False, True]
    unrolled = replace(unrolled, masks=[each & (step < trained) for step, each in enumerate(unrolled.masks)])
    laws = [(each / temperature).softmax(-1)[0, 0].detach() for each in unrolled.student_logits]
    loss = GRPOLoss(group_size=1, masked=masked, temperature=temperature, kl_weight=0.0, anchor_weight=0.0)
    total = 0.0
    for drafts in itertools.product(range(len(laws[0])), repeat=STEPS):
        windows = windows_of(unrolled, [drafts], temperature)
        monkeypatch.setattr("hf_specdec.training.losses.grpo.sample_windows", lambda *args, found=windows: found)
        likely = torch.stack([law[token] for law, token in zip(laws, drafts, strict=True)]).prod()
        total = total + likely * loss(unrolled).total
    tempered = replace(unrolled, student_logits=[each / temperature for each in unrolled.student_logits])
    expected = torch.autograd.grad(EALLoss(kl_weight=0.0)(tempered).total, list(unrolled.student_logits))
    for one, other in zip(gradients(total, unrolled), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-4)


def test_an_advantage_by_position_is_what_the_draft_changes():
    """Acceptances 0.5, 0.8 and 0.25: a window is worth 1.25 behind its second draft, 1 behind its first, and 1 at first."""
    matches = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], dtype=torch.bool).T[:, :, None, None]
    odds, trained = torch.tensor([0.5, 0.8, 0.25])[:, None, None], torch.ones(STEPS, 1, 1, dtype=torch.bool)
    windows = Windows(torch.zeros(matches.shape, dtype=torch.long), matches, trained, odds)
    expected = [[1.0, 0.25, 0.75], [1.0, 0.25, -0.25], [1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]]
    found = windows.advantages[..., 0, 0].T
    torch.testing.assert_close(found * windows.reached[..., 0, 0].T, torch.tensor(expected) / STEPS)


@pytest.mark.parametrize("ids", [None, [4, 2, 1]])
def test_odds_are_the_drafters_on_the_targets_choice(ids):
    unrolled = chain(columns=30, ids=ids)
    found = sample_windows(unrolled, 2, temperature=0.6)
    for step, logits in enumerate(unrolled.student_logits):
        law = torch.zeros(30, VOCAB)
        law[:, range(VOCAB) if ids is None else ids] = (logits.detach() / 0.6).softmax(-1)[0]
        best = unrolled.tokens[step][0]
        torch.testing.assert_close(found.odds[step, 0], law.gather(-1, best[:, None])[:, 0])
        drawn = found.drafts[step] if ids is None else torch.tensor(ids)[found.drafts[step]]
        assert torch.equal(found.matches[step], drawn == best)


def test_the_distance_to_the_reference_is_zero_at_the_reference_and_never_negative():
    unrolled = chain(rows=2)
    loss = GRPOLoss(group_size=4, kl_weight=1.0, anchor_weight=0.0)
    assert loss(unrolled).parts["reference"] > 0
    same = replace(unrolled, reference_logits=[each.detach() for each in unrolled.student_logits])
    assert loss(same).parts["reference"] == 0


def test_a_chain_ends_with_the_first_token_that_is_not_the_targets_choice():
    """Behind it the text is not what an accepted window would be, so such drafts change neither reward nor gradient."""
    unrolled = chain(columns=3)
    tokens = [each.clone() for each in unrolled.tokens]
    tokens[1][0, 1] = (tokens[1][0, 1] + 1) % VOCAB  # at column 1 the second token
    tokens[0][0, 2] = (tokens[0][0, 2] + 1) % VOCAB  # at column 2 the first one
    unrolled = replace(unrolled, tokens=tokens)
    windows = sample_windows(unrolled, 4, 1.0)
    assert windows.trained[:, 0].T.int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    value = GRPOLoss(group_size=64, temperature=1.0, kl_weight=0.1, anchor_weight=0.0)(unrolled)
    assert value.parts["judged"] == pytest.approx((1 + 2 / 3 + 1 / 3) / 3)
    touched = torch.stack(gradients(value.total, unrolled)).abs().sum(-1)[:, 0] > 0
    assert torch.equal(touched, windows.trained[:, 0])


def test_responses_are_rows_of_rounds():
    # One rollout accepts 1, 0 and 2 drafts at columns 2, 4 and 5; the other accepts nothing, at every column from 2 on.
    accepted = torch.zeros(STEPS, 2, 1, 7, dtype=torch.bool)
    accepted[:1, 0, 0, 2] = True
    accepted[:2, 0, 0, 5] = True
    accepted[:, 0, 0, 3] = True  # not visited
    trained = torch.ones(STEPS, 1, 7, dtype=torch.bool)
    trained[:, 0, 0] = False  # column 1 drafts what the prefill chooses
    windows = Windows(torch.zeros(accepted.shape, dtype=torch.long), accepted, trained, torch.zeros(trained.shape))
    rewards, visited = windows.rewards_of_responses()
    assert visited[:, 0].int().tolist() == [[0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]]
    torch.testing.assert_close(rewards.flatten(), torch.tensor([(1 + 0 + 2) / 3 / 3, 0.0]))


@pytest.mark.parametrize("num_prompt_tokens", [2, 5])
def test_rounds_of_a_response_stand_where_those_of_the_loop_do(num_prompt_tokens):
    """Windows at a temperature of nearly 0 are what greedy drafting drafts."""
    target = small_target()
    text = sample(target, list(range(7, 7 + num_prompt_tokens)), 30)
    network = drafter_for(target, "eagle")
    options = TrainingOptions(max_steps=25, batch_size=1, learning_rate=1e-2, clip=5.0)
    train(target, network, [text], RECIPES["hass"], options)
    (recording,) = roll_out(target, network, [text], steps=STEPS)
    with torch.no_grad():
        unrolled = unroll(network, observe(target, network, [text]), STEPS)
    visited = sample_windows(replace(unrolled, seeds=[0]), 1, 1e-4).rewards_of_responses()[1][0, 0]
    found = [each.anchor for each in recording.rounds]
    assert len({each.num_accepted for each in recording.rounds}) > 1
    assert found[0] == num_prompt_tokens - 1
    assert visited.nonzero().flatten().tolist()[: len(found)] == found


def test_groups_of_responses_train_visited_columns_only():
    unrolled = chain(columns=12)
    unrolled = replace(unrolled, student_logits=[(2.0 * each).requires_grad_() for each in unrolled.target_logits])
    loss = GRPOLoss(group_size=4, group="response", kl_weight=0.0, anchor_weight=0.0)
    visited = sample_windows(unrolled, 4, 1.0).rewards_of_responses()[1].any(0)[0]
    found = gradients(loss(unrolled).total, unrolled)[0].abs().sum(-1)[0] > 0
    assert not bool((found & ~visited).any())
    assert bool(found.any())
    assert not bool(visited.all())


def rounds_for(unrolled, accepted, drafts, choices):
    """One round at column 0 of the only text."""
    columns = unrolled.masks[0].shape[1]

    def spread(values, fill):
        whole = torch.full((STEPS, 1, columns), fill)
        whole[:, 0, 0] = torch.tensor(values)
        return list(whole)

    generator = torch.Generator().manual_seed(5)
    logits = [torch.randn(1, columns, VOCAB, generator=generator) for _ in range(2 * STEPS)]
    return DraftedRounds(
        spread(drafts, 0),
        spread(choices, -1),
        spread([True] * STEPS, False),
        spread([step < accepted for step in range(STEPS)], False),
        [each.requires_grad_() for each in logits[:STEPS]],
        logits[STEPS:],
    )


def with_round(accepted, *, aligned=(), **options):
    """A chain whose round at column 0 accepted so many drafts; behind, those at `aligned` are the target's own choice."""
    unrolled = chain(columns=3, **options)
    best = [int(each[0, 0]) for each in unrolled.tokens]
    drafts = [token if step < accepted else (token + 1) % VOCAB for step, token in enumerate(best)]
    choices = [
        token if step < accepted or step in aligned else (token + 2) % VOCAB for step, token in enumerate(drafts)
    ]
    return replace(unrolled, rounds=rounds_for(unrolled, accepted, drafts, choices)), best, drafts


@pytest.mark.parametrize("rejected_side", ["first", "all"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pairs", ["literal", "continuation"])
def test_dpo_is_the_formula(pairs, masked, rejected_side):
    unrolled, best, drafts = with_round(1, aligned=(2,))
    loss = DPOLoss(pairs=pairs, rejected=rejected_side, masked=masked, beta=0.5, decay=0.9, anchor_weight=0.0)

    def gain(student, reference, step, token):
        return (student[step].log_softmax(-1) - reference[step].log_softmax(-1))[0, 0, token]

    def weight(step):
        return 0.9 ** max(step - 1, 0)

    rounds = unrolled.rounds
    chosen = [0] if pairs == "literal" else [1, 2]
    rejected = [1] if masked or rejected_side == "first" else [1, 2]
    won = sum(weight(i) * gain(unrolled.student_logits, unrolled.reference_logits, i, best[i]) for i in chosen)
    lost = sum(weight(i) * gain(rounds.student_logits, rounds.reference_logits, i, drafts[i]) for i in rejected)
    value = loss(unrolled)
    torch.testing.assert_close(value.total, torch.nn.functional.softplus(-0.5 * (won - lost)))
    assert value.parts["pairs"] == pytest.approx(1 / 3)  # of three anchors
    assert value.parts["preferred"] == float(won > lost)
    pulled = torch.autograd.grad(value.total, list(rounds.student_logits), allow_unused=True)
    assert [step for step, each in enumerate(pulled) if each is not None and bool(each.any())] == rejected


def test_the_dpo_loss_is_a_mean_over_the_pairs_of_a_step():
    """Two texts, of one of which the round is no pair, and either text by itself as a part of the step."""
    parts = [with_round(1)[0], with_round(STEPS)[0], with_round(0, seed=3)[0]]
    loss = DPOLoss(beta=0.5, anchor_weight=0.0)
    alone = [loss(part).total for part in parts]
    assert [loss.num_pairs(part.rounds, part.masks) for part in parts] == [1, 0, 1]
    assert alone[1] == 0
    step = 2 / 9  # pairs by anchors
    shares = [loss(replace(part, rounds=replace(part.rounds, pairs_per_anchor=step))) for part in parts]
    whole = sum(value.total for value in shares) / 3
    torch.testing.assert_close(whole, (alone[0] + alone[2]) / 2)
    assert sum(value.parts["pairs"] for value in shares) / 3 == pytest.approx(step)
    whole = sum(value.parts["preferred"] for value in shares) / 3
    assert whole == pytest.approx(sum(loss(part).parts["preferred"] for part in parts) / 2)
    none = replace(parts[1], rounds=replace(parts[1].rounds, pairs_per_anchor=0.0))
    assert loss(none).total == 0
    near = NearReferenceLoss(loss)
    assert isinstance(near, PairLoss)
    assert near.num_pairs(parts[0].rounds, parts[0].masks) == 1
    assert NearReferenceLoss(EALLoss()).num_pairs(parts[0].rounds, parts[0].masks) == 0


def test_target_aligned_tokens_are_never_penalised():
    unrolled, _, _ = with_round(0, aligned=(1, 2))
    for masked, steps in ((True, [0]), (False, [0, 1, 2])):
        total = DPOLoss(masked=masked, anchor_weight=0.0)(unrolled).total
        pulled = torch.autograd.grad(total, list(unrolled.rounds.student_logits), allow_unused=True)
        assert [step for step, each in enumerate(pulled) if each is not None and bool(each.any())] == steps


def test_at_the_reference_each_pair_costs_ln_2_and_rounds_without_rejection_cost_nothing():
    unrolled, _, _ = with_round(1)
    rounds = replace(unrolled.rounds, reference_logits=[each.detach() for each in unrolled.rounds.student_logits])
    same = replace(unrolled, reference_logits=[each.detach() for each in unrolled.student_logits], rounds=rounds)
    for pairs in ("literal", "continuation"):
        total = DPOLoss(pairs=pairs, anchor_weight=0.0)(same).total
        torch.testing.assert_close(total, torch.tensor(2.0).log())
    whole, _, _ = with_round(3)
    assert DPOLoss(anchor_weight=0.0)(whole).total == 0
    nothing, _, _ = with_round(0)  # nothing accepted: the literal reading has no chosen side
    assert DPOLoss(pairs="literal", anchor_weight=0.0)(nothing).total == 0


def test_tokens_outside_the_draft_vocabulary_have_no_part():
    unrolled, best, _ = with_round(0)
    ids = [token for token in range(VOCAB) if token != best[1]]
    keep = lambda logits: [each[..., ids].detach().requires_grad_() for each in logits]  # noqa: E731 (three of a kind)
    rounds = replace(
        unrolled.rounds,
        student_logits=keep(unrolled.rounds.student_logits),
        reference_logits=keep(unrolled.rounds.reference_logits),
    )
    reduced = replace(
        unrolled,
        student_logits=keep(unrolled.student_logits),
        reference_logits=keep(unrolled.reference_logits),
        target_ids=torch.tensor(ids),
        rounds=rounds,
    )
    total = DPOLoss(anchor_weight=0.0)(reduced).total
    pulled = torch.autograd.grad(total, list(reduced.student_logits), allow_unused=True)
    assert [each is not None and bool(each.any()) for each in pulled] == [True, False, True]


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (GRPOLoss, {"group": "batch"}, "window"),
        (GRPOLoss, {"group_size": 1, "credit": "window"}, "group_size"),
        (GRPOLoss, {"group_size": 0}, "group_size"),
        (GRPOLoss, {"credit": "token"}, "position"),
        (DPOLoss, {"pairs": "all"}, "literal"),
        (DPOLoss, {"rejected": "last"}, "first"),
        (DPOLoss, {"beta": 0.0}, "beta"),
    ],
)
def test_options_out_of_range_are_refused(loss, options, words):
    with pytest.raises(InvalidConfigError, match=words):
        loss(**options)


def test_what_a_loss_needs_is_asked_for():
    with pytest.raises(InvalidConfigError, match="reference"):
        GRPOLoss()(replace(chain(), reference_logits=()))
    with pytest.raises(InvalidConfigError, match="seed"):
        GRPOLoss()(replace(chain(), seeds=()))
    with pytest.raises(InvalidConfigError, match="rounds"):
        DPOLoss()(chain())
