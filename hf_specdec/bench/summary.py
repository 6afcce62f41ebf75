"""From rows to figures; every formula stands here once."""

from __future__ import annotations

import statistics
from typing import Any

from hf_specdec.bench.costs import Costs
from hf_specdec.bench.runner import Row


__all__ = ["predicted_speedup", "summarize"]


def summarize(rows: list[Row], costs: Costs | None) -> dict[str, dict[str, Any]]:
    """Figures of each arm.

    Returns:
        By arm: `tokens_per_second` (decode phase, all prompts together), `speedup` (median over prompts of the ratio to
        plain on the same prompt), `predicted_speedup` and `loop_efficiency` (`speedup / predicted_speedup`) where costs
        were measured, `text_equal` (share of prompts whose tokens are plain's), and for arms of this package
        `tokens_per_round`, `acceptance_rate`, `accepted_at_position` (share of rounds that accepted at least so many),
        `lossless` and `events`.
    """
    plain = {row.prompt: row for row in rows if row.arm == "plain"}
    names = dict.fromkeys(row.arm for row in sorted(rows, key=lambda row: row.arm != "plain"))
    return {name: _arm([row for row in rows if row.arm == name], plain, costs) for name in names}


def _arm(rows: list[Row], plain: dict[int, Row], costs: Costs | None) -> dict[str, Any]:
    ratios = [row.tokens_per_second / plain[row.prompt].tokens_per_second for row in rows]
    figures: dict[str, Any] = {
        "num_prompts": len(rows),
        "num_tokens": sum(len(row.tokens) for row in rows),
        "tokens_per_second": sum(row.decode_tokens for row in rows) / sum(row.decode_seconds for row in rows),
        "speedup": statistics.median(ratios),
        "text_equal": sum(row.tokens == plain[row.prompt].tokens for row in rows) / len(rows),
    }
    if not rows[0].stats:
        return figures
    rounds = [each for row in rows for each in row.rounds]
    verified = sum(row.stats["num_verified_tokens"] for row in rows)
    accepted = sum(row.stats["num_accepted_tokens"] for row in rows)
    predicted = None if costs is None else predicted_speedup(rows, plain, costs)
    return figures | {
        "tokens_per_round": sum(emitted for _, emitted, _ in rounds) / len(rounds) if rounds else 0.0,
        "acceptance_rate": accepted / verified if verified else 0.0,
        "accepted_at_position": _accepted_share(rows, len(rounds)),
        "predicted_speedup": predicted,
        "loop_efficiency": figures["speedup"] / predicted if predicted else None,
        "lossless": all(row.stats["lossless"] for row in rows),
        "events": _events(rows),
    }


def predicted_speedup(rows: list[Row], plain: dict[int, Row], costs: Costs) -> float:
    """Plain seconds for as many tokens, over the isolated costs of the rounds' draft steps and verification passes."""
    seconds_per_token = sum(each.decode_seconds for each in plain.values()) / sum(
        each.decode_tokens for each in plain.values()
    )
    rounds = [each for row in rows for each in row.rounds]
    drafting = sum(drafted * (costs.draft_step or 0.0) for drafted, _, source in rounds if source == "model")
    verifying = sum(costs.pass_seconds(drafted + 1) for drafted, _, _ in rounds)
    return seconds_per_token * sum(emitted for _, emitted, _ in rounds) / (drafting + verifying)


def _accepted_share(rows: list[Row], num_rounds: int) -> list[float]:
    counts = [row.stats["accepted_at_position"] for row in rows]
    return [sum(each[i] for each in counts if i < len(each)) / num_rounds for i in range(max(map(len, counts)))]


def _events(rows: list[Row]) -> dict[str, int]:
    names = sorted({name for row in rows for name in row.stats["events"]})
    return {name: sum(row.stats["events"].get(name, 0) for row in rows) for name in names}
