"""Drafters that decide themselves how far they go are judged by whole rounds: they are asked for all or nothing."""

import random

import pytest
import torch

from hf_specdec.lengths import CostTable, GoodputLength
from hf_specdec.lengths.own_pace import OwnPace
from hf_specdec.records import Round


COSTS = CostTable(0.3, ((1, 1.0), (2, 1.1), (3, 1.2)))
LONGEST = 6


def round_of(drafted, attempted, accepted=None, seconds=(0.0, 0.0), num_read=0):
    accepted = drafted if accepted is None else accepted
    return Round(
        emitted=[[1] * (accepted + 1)],
        num_drafted=torch.tensor([drafted]),
        num_verified=torch.tensor([min(drafted, accepted + 1)]),
        num_accepted=torch.tensor([accepted]),
        unfinished=torch.tensor([True]),
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        source="self" if attempted else "none",
        num_attempted=None if attempted is None else torch.tensor([attempted]),
        num_read=num_read,
    )


def lengths_after(drafted, attempted, rounds=64):
    schedule = GoodputLength(longest=2, costs=COSTS).start(1)
    chosen = []
    for _ in range(rounds):
        chosen.append(int(schedule.next_budget().max_tokens[0]))
        schedule.observe(round_of(0, 0) if chosen[-1] == 0 else round_of(drafted, attempted))
    return chosen


def test_fruitless_attempts_end_in_plain_decoding():
    chosen = lengths_after(drafted=0, attempted=1)
    assert chosen[0] > 0
    assert chosen.count(0) > len(chosen) // 2


def test_fruitful_ones_go_on():
    assert 0 not in lengths_after(drafted=2, attempted=2)


def self_draft(dice, coverage, precision, length):
    """Drafted, attempted and accepted tokens of a round, with its seconds where a plain step takes one."""
    drafted = attempted = 0
    while attempted < length:
        attempted += 1
        if dice.random() >= coverage:
            break
        drafted += 1
    accepted = 0
    while accepted < drafted and dice.random() < precision:
        accepted += 1
    return round_of(drafted, attempted, accepted, (0.28 * drafted, 1.0 + 0.03 * drafted + 0.05 * (attempted > drafted)))


def speed(coverage, precision, controller=None, rounds=3000, noise=0.0):
    """Tokens per second, of a controller or of asking for the longest draft in every round."""
    dice = random.Random(7)
    schedule = controller and controller.start(1)
    tokens = seconds = 0.0
    asked = set()
    for _ in range(rounds):
        length = LONGEST if schedule is None else int(schedule.next_budget().max_tokens[0])
        asked.add(length)
        round_ = self_draft(dice, coverage, precision, length) if length else round_of(0, 0, 0, (0.0, 1.0))
        factor = 1.0 + noise * dice.random()
        took = (round_.draft_seconds * factor, round_.verify_seconds * factor)
        if schedule is not None:
            schedule.observe(
                round_of(int(round_.num_drafted), int(round_.num_attempted), int(round_.num_accepted), took)
            )
        tokens, seconds = tokens + len(round_.emitted[0]), seconds + sum(took)
    return tokens / seconds * (1.0 + noise / 2), asked


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    ("coverage", "precision"), [(0.05, 0.9), (0.2, 0.5), (0.35, 0.8), (0.6, 0.85), (0.7, 0.9), (0.9, 0.2), (1.0, 0.98)]
)
def test_the_better_of_drafting_as_far_as_it_goes_and_plain_steps(coverage, precision, noise):
    always, _ = speed(coverage, precision, noise=noise)
    best = max(1.0, always)
    found, asked = speed(coverage, precision, GoodputLength(longest=LONGEST), noise=noise)
    assert found >= 0.97 * best
    if always > 1.1:
        assert LONGEST in asked


def test_a_useless_drafter_costs_little_from_the_start():
    found, _ = speed(1.0, 0.0, GoodputLength(longest=LONGEST), rounds=128)
    assert found >= 0.97


def test_reading_what_others_wrote_is_no_pace():
    """After a rest an adapter reads all columns at once; a round that shows that is not held against it."""
    outcomes = []
    for num_read in (1, 64):
        schedule = GoodputLength(longest=LONGEST).start(1)
        schedule.observe(round_of(0, 0, 0, (0.0, 1.0)))
        schedule.observe(round_of(2, 3, 2, (0.5, 1.1)))
        for _ in range(10):
            schedule.observe(round_of(2, 3, 1, (5.0, 1.1), num_read=num_read))
        outcomes.append(schedule.forecast().length)
    assert outcomes == [0, LONGEST]


def test_means_are_guarded_against_strays_and_start_with_a_guess():
    pace = OwnPace(plain=1.0, memory=0.97)
    assert pace.tokens() == 1.5
    assert pace.tokens(1.0) > 1.5
    assert pace.seconds == pytest.approx(1.1)
    pace.observe(2.0, 100.0)
    assert pace.seconds < 1.6
    for _ in range(300):
        pace.observe(3.0, 1.4)
    assert pace.tokens(5.0) == pytest.approx(3.0, abs=0.01)
    assert pace.seconds == pytest.approx(1.4, abs=0.01)
