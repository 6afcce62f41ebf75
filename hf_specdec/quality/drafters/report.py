"""The files of a comparison: JSON, tables, a plot. One set of files holds several targets and data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.files import write_at_once
from hf_specdec.quality.drafters.plots import plot


__all__ = ["table", "write_report"]

_FINDINGS = "## Findings"  # from here on the page is written by hand


def write_report(path: Path, found: Mapping[str, Any], *, model: str, dataset: str, about: Mapping[str, Any]) -> None:
    """Writes `path` with the endings `.json`, `.md` and `.png`. What the files hold of other targets and data sets stays, and
    so does what the page says from its line `## Findings` on.

    Args:
        path (`Path`): Where to, without an ending.
        found (`Mapping`): What [`compare`] gave, with what else belongs to it.
        model (`str`): Name of the target.
        dataset (`str`): Name of the prompts.
        about (`Mapping`): How it was done: `seeds` and whatever else belongs into the file.
    """
    files = {ending: path.with_name(f"{path.name}.{ending}") for ending in ("json", "md", "png")}
    sections = _earlier(files["json"])
    sections.setdefault(model, {})[dataset] = {**about, **found}
    every = [each for _, each in _titled(sections)]
    content = {
        "summary": _summary(sections),
        "seeds": sorted({seed for each in every for seed in each["seeds"]}),
        "same_text": all(each["same_text"] for each in every),
        "found": sections,
    }
    page = files["md"].read_text(encoding="utf-8") if files["md"].exists() else ""
    written = page[page.index(_FINDINGS) :] if _FINDINGS in page else ""
    write_at_once(files["json"], (json.dumps(content, indent=1) + "\n").encode())
    write_at_once(files["md"], ("\n".join(_lines(sections)) + "\n" + (f"\n{written}" if written else "")).encode())
    write_at_once(files["png"], plot(dict(_titled(sections))))


def table(found: Mapping[str, Any]) -> str:
    """A Markdown table: tau with the bonus token counted, tau - 1 in brackets, and the gain over the baseline."""
    arms = found["arms"]
    counts = list(next(iter(arms.values())))
    lines = [f"| drafter | {' | '.join(f'step {k}' for k in counts)} |", f"|---|{'---|' * len(counts)}"]
    for name, rows in arms.items():
        cells = [f"{row['tau']:.3f} ({row['tau'] - 1:.3f}, {row['gain']:+.1f} %)" for row in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _earlier(file: Path) -> dict[str, dict[str, Any]]:
    """By target and data set, what a file holds; also one of the layout that held a single table."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if "found" in content:
        found: dict[str, dict[str, Any]] = content["found"]
        return found
    ((model, datasets),) = content.pop("summary").items()
    return {model: dict.fromkeys(datasets, content)}


def _summary(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        model: {
            dataset: {name: {k: row["tau"] for k, row in rows.items()} for name, rows in each["arms"].items()}
            for dataset, each in datasets.items()
        }
        for model, datasets in sections.items()
    }


def _titled(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for model, datasets in sections.items():
        for dataset, each in datasets.items():
            yield f"{model}, {dataset}", each


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "# Acceptance lengths of drafters"
    for title, found in _titled(sections):
        yield from ("", f"## {title}", "")
        baseline = next(iter(found["arms"]))
        yield f"Greedy, {found['num_prompts']} prompts, seeds {found['seeds']}."
        yield f"In brackets: tau - 1, and the gain over `{baseline}`."
        yield from ("", table(found), "")
        said = {key: value for key, value in found.items() if isinstance(value, str) and key != "resampled"}
        yield from (f"{key}: {value}\n" for key, value in said.items())
        yield _texts(found)
        if differences := _differences(found["arms"]):
            over = found.get("resampled", "prompts")  # not said by reports of earlier versions
            told = f"Differences from the control in tokens per round, with 95 % intervals over {over}:"
            yield from ("", told, "", *differences)
        if "pace" in found:
            yield from ("", *_pace(found["pace"]))


def _texts(found: Mapping[str, Any]) -> str:
    if found["same_text"]:
        return "Texts are the same in every arm."
    shares = ", ".join(f"{name} {share:.1%}" for name, share in found.get("text_equal", {}).items())
    return f"Texts are NOT the same in every arm. Answers that are the plain ones: {shares}."


def _differences(arms: Mapping[str, Any]) -> list[str]:
    named = {
        name: [row["difference_from_control"] for row in rows.values() if "difference_from_control" in row]
        for name, rows in arms.items()
    }
    if not any(named.values()):
        return []
    counts = list(next(iter(arms.values())))
    lines = [f"| drafter | {' | '.join(f'step {k}' for k in counts)} |", f"|---|{'---|' * len(counts)}"]
    for name, each in named.items():
        cells = (f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]" for one in each)
        lines += [f"| {name} | {' | '.join(cells)} |"] if each else []
    return lines


def _pace(pace: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Tokens per second in one process, {pace['steps']} drafts per round, {pace['num_prompts']} prompts {pace['repeats']} "
        f"times each, in turn; medians over prompts, threads: {pace['threads']}. In brackets the 95 % interval of the mean."
    )
    yield from ("", "| drafter | tokens/s | over plain | over the baseline | text equal |", "|---|---:|---:|---:|---|")
    for name, row in pace["arms"].items():
        between = "[{low:.3f}, {high:.3f}]".format(**row["interval_over_baseline"])
        yield (
            f"| {name} | {row['tokens_per_second']:.1f} | {row['speedup']:.3f}x | {row['speedup_over_baseline']:.3f}x "
            f"{between} | {'yes' if row['same_text'] else 'NO'} |"
        )
