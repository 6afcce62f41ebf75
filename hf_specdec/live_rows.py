"""Finished rows leave the batch: rounds of fewer rows, shown as if nothing had left (ours; plain decoding feeds padding)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_specdec.records import Round


__all__ = ["everyone", "worth_leaving"]

_WORTH = 0.125  # share of the rows that must have finished: dropping copies the cache of the others


def worth_leaving(unfinished: Tensor) -> bool:
    """Whether so many of the rows (`(batch,)`) have finished that the others should go on without them."""
    finished = int((~unfinished).sum())
    return 0 < finished < len(unfinished) and finished >= _WORTH * len(unfinished)


def everyone(round_: Round, rows: Tensor, batch_size: int) -> Round:
    """The round of some rows (`(kept,)`) as one of the whole batch, in which the others did nothing."""
    if len(rows) == batch_size:
        return round_
    emitted: list[list[int]] = [[] for _ in range(batch_size)]
    stretches: list[list[tuple[str, int]]] = [[] for _ in range(batch_size)]
    for place, row in enumerate(rows.tolist()):
        emitted[row], stretches[row] = list(round_.emitted[place]), list(round_.kinds[place])
    optional: dict[str, Any] = {
        name: _spread(values, rows, batch_size, nothing)
        for name, nothing in (("num_attempted", 0), ("longest", 0), ("path", -1))
        if (values := getattr(round_, name)) is not None
    }
    return replace(
        round_,
        emitted=emitted,
        num_drafted=_spread(round_.num_drafted, rows, batch_size),
        num_verified=_spread(round_.num_verified, rows, batch_size),
        num_accepted=_spread(round_.num_accepted, rows, batch_size),
        unfinished=_spread(round_.unfinished, rows, batch_size),
        stretches=stretches,
        events={name: _spread(counts, rows, batch_size) for name, counts in round_.events.items()},
        marks={name: _spread(values, rows, batch_size) for name, values in round_.marks.items()},
        num_rows=len(rows),
        **optional,
    )


def _spread(values: Tensor, rows: Tensor, batch_size: int, nothing: int = 0) -> Tensor:
    return values.new_full((batch_size, *values.shape[1:]), nothing).index_copy_(0, rows.to(values.device), values)
