"""What a model card says of a benchmark: the section of its body, and the entries of its `model-index`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from hf_specdec.bench.report import markdown
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.auto import load_network
from hf_specdec.networks.checkpoint import is_draft_checkpoint, read_checkpoint, read_json_object
from hf_specdec.networks.target import weights_fingerprint


__all__ = [
    "BEGIN",
    "DRAFTER_WEIGHTS",
    "END",
    "METRICS",
    "check_drafter",
    "eval_results",
    "read_results",
    "results_section",
]

BEGIN, END = "<!-- specdec results: begin -->", "<!-- specdec results: end -->"
DRAFTER_WEIGHTS = "drafter_weights"
_DIGITS = 4
METRICS = {"acceptance_length": "tokens_per_round", "speedup": "speedup"}
_TITLES = {"acceptance_length": "mean tokens per verification pass", "speedup": "speed-up over plain decoding"}


def read_results(path: Path) -> dict[str, Any]:
    """The contents of a `results.json` that `specdec bench` wrote.

    Args:
        path (`Path`): The file.

    Raises:
        [`InvalidConfigError`]: If the file is missing, is no such file, or measured no drafter.
    """
    if not path.is_file():
        raise InvalidConfigError(f"there is no {path}: run `specdec bench --out results` with this drafter first")
    values = read_json_object(path)
    if not values.get("summary") or "environment" not in values:
        raise InvalidConfigError(f"{path} must hold `summary` and `environment`, as `specdec bench` writes them")
    if not values["environment"].get("assistant"):
        raise InvalidConfigError(f"{path} was measured without a drafter: run `specdec bench --assistant DRAFTER`")
    if not eval_results(values):
        raise InvalidConfigError(
            f"{path} holds no arm that drafts: add one, as in `specdec bench --arms plain,model-5`"
        )
    return values


def check_drafter(folder: Path, results: dict[str, Any]) -> None:
    """Checks that figures are those of the drafter network in a folder, where both say whose they are.

    Figures of earlier versions do not, and weights in float16 cannot (see [`weights_fingerprint`]).

    Args:
        folder (`Path`): The drafter's folder.
        results (`dict`): What [`read_results`] returned.

    Raises:
        [`InvalidConfigError`]: If they were measured with other weights.
    """
    measured = results["environment"].get(DRAFTER_WEIGHTS)
    if measured is None:
        return
    known = is_draft_checkpoint(folder)
    found = weights_fingerprint(load_network(read_checkpoint(folder))) if known else "another kind of drafter"
    if found is not None and found != measured:
        raise InvalidConfigError(
            f"the results were measured with {results['environment']['assistant']}, a drafter network with the weights "
            f"{measured}, and {folder} holds {found}: run `specdec bench --assistant {folder}`"
        )


def eval_results(results: dict[str, Any]) -> list[EvalResult]:
    """For each data set and each arm of this package, its tokens per verification pass and its speed-up.

    Args:
        results (`dict`): What [`read_results`] returned.
    """
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=metric,
            metric_name=f"{_TITLES[metric]}, {arm}" + ("" if figures["lossless"] else " (not lossless)"),
            metric_value=round(figures[name], _DIGITS),
        )
        for dataset, arms in results["summary"].items()
        for arm, figures in arms.items()
        if "acceptance_rate" in figures
        for metric, name in METRICS.items()
    ]


def results_section(results: dict[str, Any], plot: str | None) -> str:
    """The card's section between its two marks: tables, what they were measured with, and which arms are lossless.

    Args:
        results (`dict`): What [`read_results`] returned.
        plot (`str`, *optional*): Name of the plot's file.
    """
    arms = {arm: figures for each in results["summary"].values() for arm, figures in each.items()}
    drafting = [arm for arm, figures in arms.items() if "acceptance_rate" in figures]
    exact = [
        arm for arm in drafting if all(each[arm]["lossless"] for each in results["summary"].values() if arm in each)
    ]
    relaxed = [arm for arm in drafting if arm not in exact]
    parts = [BEGIN, ""]
    if exact:
        parts += [f"The method keeps the target's distribution: {_names(exact)}.", ""]
    if relaxed:
        parts += [f"The method does **not** keep the target's distribution: {_names(relaxed)}.", ""]
    if plot is not None:
        parts += [f"![Speed-up and acceptance by position]({plot})", ""]
    return "\n".join([*parts, markdown(results["summary"], results["environment"]), END])


def _names(arms: list[str]) -> str:
    return ", ".join(f"`{arm}`" for arm in arms)
