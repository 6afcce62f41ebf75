"""The size of trees: from costs and from what smaller trees would have brought."""

import pytest
import torch

from hf_specdec import CostTable, InvalidConfigError
from hf_specdec.lengths import GoodputTree, TreeLength
from hf_specdec.records import Round
from hf_specdec.trees import TreeShape


SHAPE = TreeShape(4, 4, 40)


def round_of(size, path, verify_seconds=1.0, draft_seconds=0.1):
    path = torch.tensor([[node for node in path if node < size]]).long()
    accepted = torch.tensor([path.shape[1]])
    drafted = torch.tensor([size])
    return Round([[0] * (int(accepted) + 1)], drafted, accepted, accepted, torch.tensor([True]),
                 draft_seconds=draft_seconds, verify_seconds=verify_seconds, path=path)  # fmt: skip


def simulate(controller, path, cost, rounds=64):
    """Plays rounds in which `path` would be accepted of a tree that is large enough; returns the sizes."""
    schedule, sizes = controller.start(1), []
    for _ in range(rounds):
        budget = schedule.next_budget()
        size = 0 if int(budget.max_tokens[0]) == 0 else budget.max_nodes
        schedule.observe(round_of(size, path, cost(size + 1)))
        sizes.append(size)
    return sizes


def test_a_fixed_tree():
    schedule = TreeLength(SHAPE).start(2)
    budget = schedule.next_budget()
    assert (budget.max_tokens.tolist(), budget.max_nodes) == ([4, 4], 40)


@pytest.mark.parametrize(
    ("path", "slope", "best"),
    [
        ((0, 3, 7), 0.001, 8),  # no larger tree brings more
        ((0, 4), 0.001, 8),  # four nodes end before node 4
        ((0, 3, 30), 0.0, 32),  # the last node is free
        ((0, 3, 30), 0.3, 4),  # and here it costs more than it brings
        ((35,), 1.0, 0),  # nothing pays
        ((), 0.01, 0),
    ],
)
def test_the_size_that_pays_best_is_drafted(path, slope, best):
    costs = CostTable(0.01, ((1, 1.0), (101, 1.0 + 100 * slope)))
    for controller in (GoodputTree(SHAPE), GoodputTree(SHAPE, costs=costs)):
        sizes = simulate(controller, path, lambda width: 1.0 + slope * (width - 1))
        assert max(set(sizes), key=sizes.count) == best, controller
        assert sizes[16::16] == [40] * 3  # others are given another chance


def test_one_round_shows_what_every_smaller_tree_would_have_brought():
    costs = CostTable(0.0, ((1, 1.0), (101, 1.1)))
    for path, best in (((0, 4), 8), ((0, 3), 4), ((0, 7, 15), 16), ((0, 8, 39), 40)):
        schedule = GoodputTree(SHAPE, costs=costs).start(1)
        assert schedule.next_budget().max_nodes == 40
        schedule.observe(round_of(40, path))
        assert schedule.best() == best


def test_every_size_is_tried_once_where_costs_are_measured():
    controller = GoodputTree(SHAPE, (4, 16))
    assert controller.choices == (0, 4, 16, 40)
    assert simulate(controller, (0,), lambda width: 1.0, 4) == [40, 16, 4, 0]


def test_frozen_costs_leave_nothing_to_the_clock():
    costs = CostTable(0.01, ((1, 1.0), (64, 1.2)))
    sizes = [simulate(GoodputTree(SHAPE, costs=costs), (0, 3), cost) for cost in (lambda w: w, lambda w: 1.0 / w)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("options", [{"sizes": (4, 2)}, {"sizes": (0,)}, {"memory": 0.0}])
def test_impossible_options(options):
    with pytest.raises(InvalidConfigError):
        GoodputTree(**options)
