"""From rows to figures; every formula stands here once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_specdec.quality.rows import Batch, Row
from hf_specdec.quality.rule_arms import procedure_arm
from hf_specdec.quality.statistics import bootstrap_mean, paired_difference


__all__ = ["REFERENCES", "Answers", "pareto_front", "summarize"]

REFERENCES = ("plain", "exact", "random")

Answers = dict[int, dict[int, Row]]  # by seed and question


def summarize(batches: list[Batch], *, greedy: bool) -> dict[str, dict[str, Any]]:
    """Figures of each arm, over the questions that every arm has answered with all its seeds.

    Args:
        batches (`list[Batch]`): The finished batches.
        greedy (`bool`): Whether texts are comparable word for word.

    Returns:
        By arm: `num_questions`, `seeds`, `accuracy` (mean over seeds and questions; the interval resamples questions),
        `accuracy_by_seed`, `difference` (paired, by reference arm), `won` and `lost` (answers that are right where plain's
        are wrong, and the reverse; for arms with the same seeds), `text_equal` (share of answers whose tokens are the
        reference's, greedy only), `unanswered` and `cut_off` (shares of texts without a number, and without an EOS
        token), `mean_tokens`, `tokens_per_second` (all tokens over the time of the `generate` calls),
        `decode_tokens_per_second` (without the prompts' forward passes and the tokens that they give), and for arms of
        this package `tokens_per_round`, `acceptance_rate`, `fire_rate` and `changed_rate` (EASD's and the control's
        events per verified draft), `events`, and where it was measured `mean_step_tv`, `max_step_tv` and
        `num_unknown_steps` (total variation to the target's law at judged positions).
    """
    arms = {name: [batch for batch in batches if batch.arm == name] for name in _names(batches)}
    answers = {name: _answers(each) for name, each in arms.items()}
    questions = _common(answers.values())
    if not questions:
        return {}
    scores = {name: _scores(each, questions) for name, each in answers.items()}
    return {
        name: _quality(name, answers, scores, questions, greedy) | _speed(arms[name]) | _counts(arms[name])
        for name in arms
    }


def _names(batches: list[Batch]) -> list[str]:
    return list(dict.fromkeys(batch.arm for batch in sorted(batches, key=lambda batch: batch.arm not in ("plain",))))


def _answers(batches: list[Batch]) -> Answers:
    found: Answers = {}
    for batch in batches:
        found.setdefault(batch.seed, {}).update({row.question: row for row in batch.rows})
    return found


def _common(answers: Iterable[Answers]) -> list[int]:
    sets = [set(rows) for each in answers for rows in each.values()]
    return sorted(set.intersection(*sets)) if sets else []


def _scores(answers: Answers, questions: list[int]) -> NDArray[np.float64]:
    """`(seeds, questions)`, 1 where the answer is right."""
    return np.array([[answers[seed][each].correct for each in questions] for seed in sorted(answers)], dtype=np.float64)


def _quality(
    name: str,
    answers: dict[str, Answers],
    scores: dict[str, NDArray[np.float64]],
    questions: list[int],
    greedy: bool,
) -> dict[str, Any]:
    own, others = scores[name], [each for each in REFERENCES if each in scores and each != name]
    rows = [row for each in answers[name].values() for row in each.values() if row.question in set(questions)]
    figures: dict[str, Any] = {
        "num_questions": len(questions),
        "seeds": sorted(answers[name]),
        "accuracy": asdict(bootstrap_mean(own.mean(0))),
        "accuracy_by_seed": own.mean(1).tolist(),
        "difference": {each: asdict(paired_difference(own.mean(0), scores[each].mean(0))) for each in others},
        "unanswered": float(np.mean([row.answer is None for row in rows])),
        "cut_off": float(np.mean([not row.ended for row in rows])),
        "mean_tokens": float(np.mean([len(row.tokens) for row in rows])),
    }
    if "plain" in others and own.shape == scores["plain"].shape:
        figures |= {"won": int((own > scores["plain"]).sum()), "lost": int((own < scores["plain"]).sum())}
    if greedy:
        figures["text_equal"] = {each: _equal(answers[name], answers[each], questions) for each in others}
    return figures


def _equal(own: Answers, other: Answers, questions: list[int]) -> float:
    """Share of equal texts; greedy references without dice have one seed, which stands for all."""
    single = next(iter(other.values()))
    return float(
        np.mean(
            [
                rows[each].tokens == other.get(seed, single)[each].tokens
                for seed, rows in own.items()
                for each in questions
            ]
        )
    )


def _speed(batches: list[Batch]) -> dict[str, float]:
    tokens = sum(len(row.tokens) for batch in batches for row in batch.rows)
    first = sum(len(batch.rows) for batch in batches)
    return {
        "tokens_per_second": tokens / sum(batch.seconds for batch in batches),
        "decode_tokens_per_second": (tokens - first) / sum(batch.decode_seconds for batch in batches),
    }


def _counts(batches: list[Batch]) -> dict[str, Any]:
    rows = [row.counts for batch in batches for row in batch.rows]
    if not any(rows):
        return {}
    total = {name: sum(row.get(name, 0) for row in rows) for name in dict.fromkeys(key for row in rows for key in row)}
    if "num_rounds" not in total:  # a procedure, which has no rounds
        return {"events": total}
    verified, rounds = total["num_verified_tokens"], total["num_rounds"]
    events = {name: count for name, count in total.items() if not name.startswith(("num_", "tv_"))}
    figures: dict[str, Any] = {
        "tokens_per_round": (total["num_new_tokens"] - len(rows)) / rounds if rounds else 0.0,
        "acceptance_rate": total["num_accepted_tokens"] / verified if verified else 0.0,
        "num_verified_tokens": verified,
        "events": events,
    }
    for figure, names in _EVENT_RATES.items():
        if found := [events[name] for name in names if name in events]:
            figures[figure] = sum(found) / verified if verified else 0.0
    figures |= _distances(rows, total)
    rates = {batch.rate for batch in batches if batch.rate is not None}
    return figures | ({"control_rate": max(rates)} if rates else {})


def _distances(rows: list[dict[str, Any]], total: dict[str, Any]) -> dict[str, Any]:
    """`mean_step_tv` and `max_step_tv` over the judged positions where they are known, and how many are not."""
    if not total.get("tv_steps"):
        return {}
    largest = max(row["tv_max"] for row in rows if "tv_max" in row)
    return {
        "mean_step_tv": total["tv_total"] / total["tv_steps"],
        "max_step_tv": largest,
        "num_unknown_steps": total["tv_unknown"],
    }


_EVENT_RATES = {"fire_rate": ("easd_fired",), "changed_rate": ("easd_changed_token", "random_changed_token")}


def pareto_front(summary: dict[str, dict[str, Any]]) -> list[str]:
    """The arms that no other one beats in accuracy without losing speed, or in speed without losing accuracy, the fastest
    first. Means only: intervals may overlap. Procedures answer one question at a time, so their speed is another one's."""
    points = {
        name: (each["tokens_per_second"], each["accuracy"]["mean"])
        for name, each in summary.items()
        if procedure_arm(name) is None
    }

    def is_beaten(own: tuple[float, float]) -> bool:
        return any(other != own and other[0] >= own[0] and other[1] >= own[1] for other in points.values())

    return sorted((name for name, own in points.items() if not is_beaten(own)), key=lambda name: -points[name][0])
