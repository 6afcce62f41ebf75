"""The cost model of speculative decoding: predicted speed-ups from measured times."""

ACCEPTANCES = (0.6, 0.7, 0.8)
LENGTHS = (1, 3, 5)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per round, (1 - a^(g+1)) / (1 - a), for a draft of `length` tokens."""
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def predicted_speedup(acceptance: float, length: int, draft_cost: float, verify_cost: float) -> float:
    """tau / (g * c + v(g)); both costs are in plain decode steps."""
    return expected_tokens(acceptance, length) / (length * draft_cost + verify_cost)


def exit_cost(layers: int, exit_layers: int, head_in_layers: float) -> float:
    """Cost of a self-drafted token, (e + h) / (L + h), in plain decode steps."""
    return (exit_layers + head_in_layers) / (layers + head_in_layers)


def predictions(
    layers: int, passes: dict[int, float], layer: float, head: float, drafts: dict[str, float]
) -> list[dict]:
    """One row per acceptance rate and draft length, with the speed-up of each way of drafting.

    Args:
        layers (`int`): Depth of the target.
        passes (`dict[int, float]`): Milliseconds of a target pass over each number of rows.
        layer (`float`): Milliseconds of one layer.
        head (`float`): Milliseconds of the head.
        drafts (`dict[str, float]`): Milliseconds of a decode step of each draft model.
    """
    costs = {name: value / passes[1] for name, value in drafts.items()}
    exits = {f"exit_{p}%": exit_cost(layers, round(layers * p / 100), head / layer) for p in (25, 50)}
    rows = []
    for acceptance in ACCEPTANCES:
        for length in LENGTHS:
            verify = passes[length + 1] / passes[1]
            row = {name: predicted_speedup(acceptance, length, cost, verify) for name, cost in costs.items()}
            row |= {name: predicted_speedup(acceptance, length, cost, 1.0) for name, cost in exits.items()}
            rows.append({"acceptance": acceptance, "length": length, **row})
    return rows
