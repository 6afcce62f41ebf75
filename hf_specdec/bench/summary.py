"""From rows to figures; every formula stands here once."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection
from typing import Any

from hf_specdec.bench.cost_log import Priced
from hf_specdec.bench.costs import Costs
from hf_specdec.bench.replay import PRICED, best_constant, oracle_seconds, replay_seconds, sources_of
from hf_specdec.bench.runner import Row
from hf_specdec.lengths.forecast import expected_tokens


__all__ = ["summarize"]

_LONGEST = 17  # lengths that Leviathan's formula is asked about, none included


def summarize(
    rows: list[Row], costs: Priced | None, *, sampled: bool = False, unpriced: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Figures of each arm.

    Args:
        rows (`list[Row]`): The rows of one data set.
        costs ([`Costs`] or [`CostLog`], *optional*): Isolated costs, for what they predict.
        sampled (`bool`): Whether the texts were sampled, so that equal texts are not to be expected.
        unpriced (`Collection[str]`): Arms whose draft steps `costs` does not know. Drafts of the model itself and trees are
            not known to them either.

    Returns:
        By arm: `tokens_per_second` (decode phase, all prompts together), `speedup` (median over prompts of the ratio to
        plain on the same prompt), `prefill_seconds` (median per prompt, not in the speeds), `tokens_per_round` (of the decode
        phase), `peak_memory` (the most bytes in use during any call), `lossless` (whether the method keeps the target's law),
        `text_equal` (share of prompts whose tokens are plain's). For arms of this package also `acceptance_rate`,
        `accepted_at_position` (share of rounds that accepted at least so many), `events`, and, where costs were measured,
        `predicted_speedup`, `loop_efficiency` (`speedup / predicted_speedup`), `replayed_tokens_per_second`,
        `ceiling_speedup`, `oracle_speedup` and `best_constant`, which [`hf_specdec.bench.replay`] defines;
        `theoretical_limit`, `min(tau, 1 / c)` with the arm's tokens per round and, where the model alone drafts, a draft
        step's cost in plain steps; and `leviathan_limit`, the largest `(1 - alpha^(g + 1)) / ((1 - alpha)(g c + v(g)))` over
        lengths `g` (arXiv 2211.17192). What is not known of an arm is None.

        Of prompts that were decoded in batches, medians are over batches, `tokens_per_round` and the acceptance are those of
        a row, and there is no `best_constant`.
    """
    plain = {row.prompt: row for row in rows if row.arm == "plain"}
    names = dict.fromkeys(row.arm for row in sorted(rows, key=lambda row: row.arm != "plain"))
    summary = {}
    for name in names:
        own = [row for row in rows if row.arm == name]
        summary[name] = _speeds(own, plain, sampled)
        if own[0].stats:
            summary[name] |= _counts(own)
            if costs is not None and name not in unpriced and sources_of(own) <= PRICED:
                beside = _beside(costs, own, reduced="-reduced" in name)
                typical = costs.typical.reduced if "-reduced" in name else costs.typical
                summary[name] |= _predictions(own, rows, plain, beside, typical)
                summary[name]["loop_efficiency"] = summary[name]["speedup"] / summary[name]["predicted_speedup"]
                summary[name] |= _limits(summary[name], typical, sources_of(own))
    _add_ceilings(summary, {name: sources_of(row for row in rows if row.arm == name) for name in summary})
    return summary


def _add_ceilings(summary: dict[str, dict[str, Any]], sources: dict[str, set[str]]) -> None:
    """The best prediction from an arm's own sources."""
    predicted = [name for name in summary if summary[name]["predicted_speedup"] is not None]
    for name in predicted:
        rivals = [
            other
            for other in predicted
            if other == name
            or (
                summary[other]["lossless"]
                and sources[other] <= sources[name]
                and ("-reduced" in other) == ("-reduced" in name)
            )
        ]
        constants = [constant["speedup"] for other in rivals if (constant := summary[other]["best_constant"])]
        summary[name]["ceiling_speedup"] = max([*(summary[other]["predicted_speedup"] for other in rivals), *constants])


def _beside(costs: Priced, rows: list[Row], *, reduced: bool) -> dict[int, Costs]:
    """What passes and steps cost when each prompt was decoded."""
    found = {row.prompt: costs.beside(row.prompt) for row in rows}
    return {prompt: each.reduced for prompt, each in found.items()} if reduced else found


def _median_speedup(rows: list[Row], plain: dict[int, Row], seconds: list[float]) -> float:
    """The median over prompts of plain seconds for as many tokens over `seconds`."""
    return statistics.median(
        _num_emitted([row]) / plain[row.prompt].tokens_per_second / each
        for row, each in zip(rows, seconds, strict=True)
    )


def _seconds_per_token(plain: dict[int, Row], beside: dict[int, Costs], typical: Costs) -> float:
    """Of plain decoding, as if all prompts had been decoded at the typical pace."""
    known = {prompt: row for prompt, row in plain.items() if prompt in beside}
    seconds = sum(
        row.decode_seconds * typical.pass_seconds(1) / beside[prompt].pass_seconds(1) for prompt, row in known.items()
    )
    return seconds / sum(row.decode_tokens for row in known.values())


def _num_emitted(rows: list[Row]) -> int:
    return sum(emitted for row in rows for _, emitted, *_ in row.rounds)


def _speeds(rows: list[Row], plain: dict[int, Row], sampled: bool) -> dict[str, Any]:
    rounds, tokens = sum(row.decode_rounds for row in rows), sum(row.decode_tokens for row in rows)
    return {
        "num_prompts": sum(len(row.batch) or 1 for row in rows),
        "num_tokens": sum(len(row.tokens) for row in rows),
        "tokens_per_second": tokens / sum(row.decode_seconds for row in rows),
        "speedup": statistics.median(row.tokens_per_second / plain[row.prompt].tokens_per_second for row in rows),
        "prefill_seconds": statistics.median(row.prefill_seconds for row in rows),
        "tokens_per_round": tokens / rounds if rounds and not rows[0].batch else None,
        "peak_memory": max((row.peak_memory for row in rows if row.peak_memory is not None), default=None),
        "predicted_speedup": None,
        "loop_efficiency": None,
        "ceiling_speedup": None,
        "oracle_speedup": None,
        "best_constant": None,
        "lossless": True,  # of plain and stock decoding and of the peers' arms by their own account
        "text_equal": None if sampled else _equal_share(rows, plain),
    }


def _equal_share(rows: list[Row], plain: dict[int, Row]) -> float:
    pairs = [
        pair
        for row in rows
        for pair in zip(row.batch or [row.tokens], plain[row.prompt].batch or [plain[row.prompt].tokens], strict=True)
    ]
    return sum(own == theirs for own, theirs in pairs) / len(pairs)


def _counts(rows: list[Row]) -> dict[str, Any]:
    num_rounds = sum(sum(map(len, row.row_rounds)) or len(row.rounds) for row in rows)
    verified = sum(row.stats["num_verified_tokens"] for row in rows)
    accepted = sum(row.stats["num_accepted_tokens"] for row in rows)
    return {
        "tokens_per_round": _num_emitted(rows) / num_rounds if num_rounds else 0.0,
        "acceptance_rate": accepted / verified if verified else 0.0,
        "accepted_at_position": _accepted_share(rows, num_rounds),
        "lossless": all(row.stats["lossless"] for row in rows),
        "events": _events(rows),
    }


def _predictions(
    rows: list[Row], everyone: list[Row], plain: dict[int, Row], beside: dict[int, Costs], typical: Costs
) -> dict[str, Any]:
    known = [row for row in everyone if row.rounds]
    sources = sources_of(rows)
    replayed = [replay_seconds([row], beside[row.prompt]) for row in rows]
    fastest = [oracle_seconds(row, known, sources, beside[row.prompt]) for row in rows]
    return {
        "predicted_speedup": _median_speedup(rows, plain, replayed),
        "replayed_tokens_per_second": _num_emitted(rows) / sum(replayed),
        "oracle_speedup": _median_speedup(rows, plain, fastest),
        "best_constant": None
        if rows[0].batch
        else best_constant(rows, typical, _seconds_per_token(plain, beside, typical)),
    }


def _limits(figures: dict[str, Any], costs: Costs, sources: set[str]) -> dict[str, float]:
    """What no loop exceeds with these acceptances: a round takes a plain step at least, and where the model alone drafts, a
    token takes a draft step. And Leviathan's formula for drafts of one length."""
    step = (costs.c or 0.0) if sources == {"model"} else 0.0
    alpha, tau = figures["acceptance_rate"], figures["tokens_per_round"]
    by_length = [
        expected_tokens([alpha] * length, length) / (length * step + costs.v(length)) for length in range(_LONGEST)
    ]
    return {"theoretical_limit": min(tau, 1 / step) if step else tau, "leviathan_limit": max(by_length)}


def _accepted_share(rows: list[Row], num_rounds: int) -> list[float]:
    counts = [row.stats["accepted_at_position"] for row in rows]
    return [sum(each[i] for each in counts if i < len(each)) / num_rounds for i in range(max(map(len, counts)))]


def _events(rows: list[Row]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        for name, count in row.stats["events"].items():
            # What is counted by kind, as drafts are by exit depth, has an entry for each.
            kinds = (
                {f"{name} {kind}": each for kind, each in count.items()} if isinstance(count, dict) else {name: count}
            )
            counts.update(kinds)
    return dict(sorted(counts.items()))
