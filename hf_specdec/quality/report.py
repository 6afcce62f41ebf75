"""The three outputs of a quality measurement: figures as JSON, tables as Markdown, a plot as PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_specdec.bench.report import told
from hf_specdec.files import write_at_once
from hf_specdec.quality.plots import plot
from hf_specdec.quality.rows import Batch
from hf_specdec.quality.statistics import RESAMPLES
from hf_specdec.quality.summary import REFERENCES, pareto_front


__all__ = ["interval", "markdown", "tables", "write_report"]

_SPEED = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "decode_tokens_per_second": ("decode tokens/s", "{:.1f}"),
    "mean_tokens": ("tokens per text", "{:.0f}"),
    "tokens_per_round": ("tokens/round", "{:.2f}"),
    "acceptance_rate": ("acceptance", "{:.1%}"),
    "mean_step_tv": ("mean step TV", "{:.4f}"),
    "max_step_tv": ("max step TV", "{:.4f}"),
    "fire_rate": ("fired", "{:.2%}"),
    "changed_rate": ("changed token", "{:.2%}"),
    "unanswered": ("no answer", "{:.1%}"),
    "cut_off": ("cut off", "{:.1%}"),
}


def write_report(
    prefix: Path,
    summary: dict[str, dict[str, Any]],
    batches: list[Batch],
    environment: dict[str, Any],
    settings: dict[str, Any],
) -> list[Path]:
    """Writes `PREFIX.json`, `PREFIX.md` and `PREFIX.png`, each at once or not at all.

    Args:
        prefix (`Path`): Path without suffix.
        summary (`dict`): By arm, the figures of [`hf_specdec.quality.summarize`].
        batches (`list[Batch]`): The finished batches; of each answer the JSON holds whether it is right.
        environment, settings (`dict`): What the figures were measured with.
    """
    paths = [prefix.with_name(prefix.name + suffix) for suffix in (".json", ".md", ".png")]
    content = {
        "summary": summary,
        "settings": settings,
        "environment": environment,
        "answers": [line for batch in batches for line in _answers(batch)],
    }
    write_at_once(paths[0], _json(content).encode())
    write_at_once(paths[1], markdown(summary, environment, settings).encode())
    write_at_once(paths[2], plot(summary, _title(summary, settings)))
    return paths


def markdown(summary: dict[str, dict[str, Any]], environment: dict[str, Any], settings: dict[str, Any]) -> str:
    """The tables, and below them what they were measured with."""
    lines = [f"## {_title(summary, settings)}", "", tables(summary), "", "## Measured with", ""]
    lines += told(settings | environment)
    return "\n".join(lines) + "\n"


def tables(summary: dict[str, dict[str, Any]]) -> str:
    """Two Markdown tables, answers and speed."""
    front = f"Pareto front of accuracy and tokens/s: {', '.join(f'`{name}`' for name in pareto_front(summary))}."
    return "\n".join([*_answer_table(summary), "", *_speed_table(summary), "", front, "", _remarks(summary)])


def _answer_table(summary: dict[str, dict[str, Any]]) -> list[str]:
    references = [name for name in REFERENCES if name in summary]
    equal = [name for name in references if any(name in each.get("text_equal", {}) for each in summary.values())]
    titles = ["accuracy (%)", "seeds", *(f"minus {name} (points)" for name in references), "won / lost"]
    titles += [f"text equal to {name}" for name in equal]
    lines = ["| arm | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for name, each in summary.items():
        cells = [interval(each["accuracy"], "{:.1f}"), str(len(each["seeds"]))]
        cells += [interval(each["difference"].get(other), "{:+.1f}") for other in references]
        cells.append(f"{each['won']} / {each['lost']}" if "won" in each else "")
        cells += [f"{each['text_equal'][other]:.0%}" if other in each["text_equal"] else "" for other in equal]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _speed_table(summary: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| arm | " + " | ".join(title for title, _ in _SPEED.values()) + " |", "|---|" + "---:|" * len(_SPEED)]
    for name, each in summary.items():
        cells = [form.format(each[key]) if key in each else "" for key, (_, form) in _SPEED.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _remarks(summary: dict[str, dict[str, Any]]) -> str:
    remarks = [
        f"In brackets: 95 % percentile intervals of {RESAMPLES} bootstrap resamples of the questions; differences are paired. "
        "Won / lost: answers that are right where those of `plain` are wrong, and the reverse. Fired and changed token: share "
        "of verified drafts. Step TV: total variation of the emitted law to the target's at judged positions, where known."
    ]
    for name, each in summary.items():
        if "control_rate" in each:
            remarks.append(f"`{name}` rejects an aligned draft with probability {each['control_rate']:.4f}.")
    return " ".join(remarks)


def interval(estimate: dict[str, float] | None, form: str) -> str:
    """A share and its interval, in points; nothing where there is none."""
    if estimate is None:
        return ""
    mean, low, high = (form.format(100 * estimate[key]) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _title(summary: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    questions = next(iter(summary.values()))["num_questions"] if summary else 0
    temperature = settings["temperature"]
    return f"{settings['data']}, {questions} questions, {f'T = {temperature:g}' if temperature else 'greedy'}"


def _answers(batch: Batch) -> list[dict[str, Any]]:
    return [
        {"arm": batch.arm, "seed": batch.seed, "question": row.question, "answer": row.answer, "correct": row.correct}
        for row in batch.rows
    ]


def _json(content: dict[str, Any]) -> str:
    """Indented, but with one line for each answer."""
    answers = ",\n".join("  " + json.dumps(each) for each in content["answers"])
    rest = json.dumps({**content, "answers": []}, indent=1)
    return rest.removesuffix("[]\n}") + f"[\n{answers}\n ]\n}}\n"
