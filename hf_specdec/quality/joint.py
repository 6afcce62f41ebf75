"""Quality measurements of the same arms on several sets of questions, as one table and one plot.

    python -m hf_specdec.quality.joint gsm8k.json humaneval.json --out rules

Reads the JSON reports of `specdec quality` and writes OUT.json, OUT.md and OUT.png.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.bench.report import told
from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import write_at_once
from hf_specdec.quality.plots import draw_speed
from hf_specdec.quality.report import interval
from hf_specdec.quality.rule_arms import procedure_arm
from hf_specdec.quality.summary import pareto_front


__all__ = ["join", "markdown", "plot"]

_FIGURES = {
    "tokens_per_round": ("tokens/round", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "mean_step_tv": ("mean step TV", "{:.4f}"),
    "max_step_tv": ("max step TV", "{:.2f}"),
}
_MAY_DIFFER = ("memory", "policy", "tv")
_BASE = "exact"  # the arm that the others are compared with


def join(reports: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`summary`, `settings`, `environment` and `answers`, each by the task of its report.

    A further report of a task adds the arms that need what was learnt before: those of a calibrated memory or a policy.

    Args:
        reports (`Sequence[dict]`): The contents of reports of `specdec quality`.

    Raises:
        [`InvalidConfigError`]: If the reports are of different models, or two of one task were measured differently.
    """
    for key in ("target", "assistant"):
        if len(models := {report["settings"][key] for report in reports}) > 1:
            raise InvalidConfigError(f"expected reports of one {key}, got those of {', '.join(map(str, models))}")
    by_task: dict[str, dict[str, Any]] = {}
    for report in reports:
        task = report["settings"].get("task", "gsm8k")
        by_task[task] = report if task not in by_task else _added(by_task[task], report, task)
    keys = ("summary", "settings", "environment", "answers")
    return {key: {task: report[key] for task, report in by_task.items()} for key in keys}


def _added(first: dict[str, Any], more: dict[str, Any], task: str) -> dict[str, Any]:
    settings, others = first["settings"], more["settings"]
    differing = sorted(
        key for key in (settings.keys() | others.keys()) - set(_MAY_DIFFER) if settings.get(key) != others.get(key)
    )
    if differing:
        raise InvalidConfigError(
            f"two reports of {task} go together if they were measured alike, but these differ in {', '.join(differing)}"
        )
    names = {arm: _name(arm, first["summary"], others) for arm in more["summary"]}
    summary = {name: more["summary"][arm] for arm, name in names.items() if name is not None}
    if not summary:
        raise InvalidConfigError(f"two reports of {task} hold the same arms: pass one of them")
    answers = [each | {"arm": names[each["arm"]]} for each in more["answers"] if names[each["arm"]] is not None]
    return first | {
        "summary": first["summary"] | summary,
        "settings": settings | {key: others[key] for key in _MAY_DIFFER if key in others},
        "answers": first["answers"] + answers,
    }


def _name(arm: str, known: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """What an arm of a further report is called; None for one that is known."""
    if arm not in known:
        return arm
    learnt = {"csd": "memory", "cospec": "policy"}.get(arm)
    return f"{arm}-calibrated" if learnt in settings and f"{arm}-calibrated" not in known else None


def markdown(joint: dict[str, dict[str, Any]], notes: Sequence[str] = ()) -> str:
    """One table of all arms, and below it what they were measured with and the notes."""
    summaries = joint["summary"]
    arms = list(dict.fromkeys(arm for summary in summaries.values() for arm in summary))
    titles = ["arm"]
    for name in summaries:
        titles += [f"{name}: {title}" for title, _ in _FIGURES.values()]
        titles += [f"{name}: accuracy (%)", f"{name}: minus {_BASE} (points)"]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for arm in arms:
        cells = [cell for summary in summaries.values() for cell in _cells(summary.get(arm, {}))]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    fronts = [
        f"- {name}: {', '.join(f'`{arm}`' for arm in pareto_front(summary))}" for name, summary in summaries.items()
    ]
    lines += ["", "Pareto front of accuracy and tokens/s:", "", *fronts]
    if any(procedure_arm(arm) is not None for arm in arms):
        lines += ["", "`rsd` answers one question at a time, so its speed stands outside the comparison."]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    for name in summaries:
        about = joint["settings"][name] | joint["environment"][name]
        lines += ["", f"## {name} was measured with", "", *told(about)]
    return "\n".join(lines) + "\n"


def plot(joint: dict[str, dict[str, Any]]) -> bytes:
    """A PNG: accuracy against speed, a panel for each set of questions, with the Pareto front marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summaries = joint["summary"]
    figure = Figure(figsize=(7.5 * len(summaries), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, summary) in zip(
        figure.subplots(1, len(summaries), squeeze=False)[0], summaries.items(), strict=True
    ):
        draw_speed(axis, summary)
        questions = next(iter(summary.values()))["num_questions"]
        axis.set_title(f"{name}, {questions} questions; diamonds: the Pareto front")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _cells(figures: dict[str, Any]) -> list[str]:
    cells = [form.format(figures[key]) if figures.get(key) is not None else "" for key, (_, form) in _FIGURES.items()]
    accuracy = interval(figures.get("accuracy"), "{:.1f}")
    return [*cells, accuracy, interval(figures.get("difference", {}).get(_BASE), "{:+.1f}")]


def main(arguments: list[str] | None = None) -> None:
    """Joins the reports that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="JSON reports of specdec quality")
    parser.add_argument("--out", required=True, type=Path, help="writes OUT.json, OUT.md and OUT.png")
    parser.add_argument("--note", action="append", default=[], help="a remark below the table; may be given repeatedly")
    options = parser.parse_args(arguments)
    joint = join([json.loads(report.read_text(encoding="utf-8")) for report in options.reports])
    write_at_once(
        options.out.with_name(options.out.name + ".json"),
        (json.dumps(joint | {"notes": options.note}, indent=1) + "\n").encode(),
    )
    write_at_once(options.out.with_name(options.out.name + ".md"), markdown(joint, options.note).encode())
    write_at_once(options.out.with_name(options.out.name + ".png"), plot(joint))


if __name__ == "__main__":
    main()
