"""What annealing and the bounds are worth, along hand-made traces."""

import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.training.exit_heads import ExitTrace, LayerCosts, ablate, precision_at_coverage


COSTS = LayerCosts(layer=1.0, heads=dict.fromkeys((2, 4, 9), 0.1), step=10.0, row=0.02)


def trace_of(
    sure: dict[int, list[float]], right: dict[int, list[bool]], annealed: dict[int, list[float]] | None = None
):
    confidence = {(depth, 0.0): torch.tensor(values) for depth, values in sure.items()}
    for alpha in (0.5, 1.0):
        confidence |= {(depth, alpha): torch.tensor(values) for depth, values in (annealed or sure).items()}
    return ExitTrace({depth: torch.tensor(values) for depth, values in right.items()}, confidence)


def test_precision_counts_the_first_exit_that_is_sure():
    sure = {2: [0.9, 0.2, 0.1, 0.3], 4: [0.95, 0.8, 0.6, 0.4]}
    right = {2: [False, True, True, True], 4: [True, True, False, False]}
    annealed = {2: [0.5, 0.2, 0.1, 0.1], 4: [0.95, 0.8, 0.6, 0.4]}
    found = precision_at_coverage([trace_of(sure, right, annealed)], (2, 4), (0.0, 0.5), (0.25, 0.5, 1.0))
    # Half of the tokens leave above 0.8: the first one after two layers with a wrong draft, unless annealing holds it back.
    assert found[0.0] == pytest.approx({0.25: 1.0, 0.5: 0.5, 1.0: 0.25})
    assert found[0.5] == pytest.approx({0.25: 1.0, 0.5: 1.0, 1.0: 0.25})


def test_each_part_is_missed_where_it_is_needed():
    """Shallow exits are sure and wrong at every second token, the deepest costs more than it brings."""
    size = 60
    sure, low = [0.9] * size, [0.05] * size
    trace = trace_of(
        {2: sure, 4: low, 9: sure},
        {2: [i % 6 != 5 for i in range(size)], 4: [False] * size, 9: [True] * size},
    )
    found = ablate([trace], (2, 4, 9), 10, COSTS)
    assert list(found) == ["whole rule", "no annealing", "no depth bound", "no width bound"]
    assert all(each.policy.exit_layers == (2, 4, 9) for each in found.values())
    assert found["no annealing"].policy.annealing == 0.0
    assert found["no depth bound"].policy.max_depth == 9
    assert found["no width bound"].policy.max_width > 6
    best = found["whole rule"]
    assert best.policy.max_width == 6
    assert best.speed_up > found["no width bound"].speed_up
    assert all(best.speed_up >= each.speed_up for each in found.values())


def test_a_depth_bound_spares_exits_that_are_never_sure():
    right = [i % (3 if i < 30 else 6) > 0 for i in range(60)]  # stretches that no one width fits
    sure, low = [0.9 if each else 0.05 for each in right], [0.05] * 60
    trace = trace_of({2: sure, 4: low, 9: low}, dict.fromkeys((2, 4, 9), right))
    found = ablate([trace], (2, 4, 9), 10, COSTS)
    assert found["whole rule"].policy.max_depth == 2
    assert found["whole rule"].speed_up > found["no depth bound"].speed_up


def test_too_few_exits_are_refused():
    with pytest.raises(InvalidConfigError, match="three exits"):
        ablate([trace_of({2: [0.5]}, {2: [True]})], (2,), 10, COSTS)
