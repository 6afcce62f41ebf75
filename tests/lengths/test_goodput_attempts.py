"""Drafters that look for a token and find none worth proposing do not pay, although no draft is ever rejected."""

import torch

from hf_specdec.lengths import CostTable, GoodputLength
from hf_specdec.records import Round


COSTS = CostTable(0.3, ((1, 1.0), (2, 1.1), (3, 1.2)))


def round_of(drafted, attempted):
    return Round(
        emitted=[[1] * (drafted + 1)],
        num_drafted=torch.tensor([drafted]),
        num_verified=torch.tensor([drafted]),
        num_accepted=torch.tensor([drafted]),
        unfinished=torch.tensor([True]),
        source="self",
        num_attempted=None if attempted is None else torch.tensor([attempted]),
    )


def lengths_after(drafted, attempted, rounds=24):
    schedule = GoodputLength(longest=2, costs=COSTS).start(1)
    chosen = []
    for _ in range(rounds):
        chosen.append(int(schedule.next_budget().max_tokens[0]))
        plain = chosen[-1] == 0
        schedule.observe(round_of(0, 0 if attempted is not None else None) if plain else round_of(drafted, attempted))
    return chosen


def test_fruitless_attempts_end_in_plain_decoding():
    chosen = lengths_after(drafted=0, attempted=1)
    assert chosen[0] > 0
    assert chosen.count(0) > len(chosen) // 2


def test_fruitful_ones_go_on():
    assert 0 not in lengths_after(drafted=2, attempted=2)
