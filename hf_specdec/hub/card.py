"""A drafter's model card, made from its config and the `results.json` of `specdec bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_specdec.errors import InvalidConfigError
from hf_specdec.hub.methods import method_of
from hf_specdec.hub.repo_id import is_repo_id
from hf_specdec.hub.results import BEGIN, END, METRICS, check_drafter, eval_results, read_results, results_section
from hf_specdec.networks.checkpoint import read_json_object
from hf_specdec.networks.serving import launch_lines


__all__ = ["CARD", "PLOT", "RESULTS", "CardFacts", "check_card", "render_card", "target_named"]

CARD, RESULTS, PLOT = "README.md", "results.json", "results.png"
_SERVED = {"vllm": "vLLM", "sglang": "SGLang"}
_STEPS = 5
_LOAD = {
    True: (
        "from hf_specdec import AutoDrafter, RCSDConfig",
        'drafter = AutoDrafter.from_pretrained("{name}", target=target)',
        "RCSDConfig()",
    ),
    False: (
        "from hf_specdec import ExactConfig",
        'drafter = AutoModelForCausalLM.from_pretrained("{name}")',
        "ExactConfig()",
    ),
}


@dataclass(frozen=True)
class CardFacts:
    """What a card says and no file shows. What is None stays as an existing card has it.

    Args:
        name (`str`, *optional*): The drafter's Hub id; the folder's name by default.
        base_model (`str`, *optional*): Hub id of the target; by default the one that the drafter's config names.
        base_revision (`str`, *optional*): The target's revision, for a new card.
        license (`str`, *optional*): Identifier of the licence, which must fit the target's.
        languages (`tuple[str, ...]`, *optional*): Codes of the languages.
        datasets (`tuple[str, ...]`, *optional*): Hub ids of the training data.
    """

    name: str | None = None
    base_model: str | None = None
    base_revision: str | None = None
    license: str | None = None
    languages: tuple[str, ...] | None = None
    datasets: tuple[str, ...] | None = None


def render_card(
    folder: Path, results: Path | None = None, facts: CardFacts | None = None, existing: Path | None = None
) -> str:
    """The text of a drafter's card. An existing card keeps its prose; its figures are made anew.

    Args:
        folder (`Path`): The drafter's folder, with `config.json` and, if it is there, `README.md`.
        results (`Path`, *optional*): The figures; `results.json` in the folder by default.
        facts ([`CardFacts`], *optional*): What else the card says.
        existing (`Path`, *optional*): The card that keeps its prose; `README.md` in the folder by default.

    Raises:
        [`InvalidConfigError`]: If the figures are no drafter's or another one's, the target's Hub id is not known, or the
            existing card has no place for figures.
    """
    facts, measured = facts or CardFacts(), read_results(results or folder / RESULTS)
    check_drafter(folder, measured)
    plot = (folder / RESULTS if results is None else results).with_suffix(".png")
    section = results_section(measured, PLOT if plot.is_file() else None)
    config = read_json_object(folder / "config.json")
    existing = existing or folder / CARD
    if existing.is_file():
        card = ModelCard.load(existing)
        data, body = card.data, _with_section(card.text, section)
    else:
        data, body = ModelCardData(), None
    _fill(data, folder, config, facts)
    data.eval_results = eval_results(measured)
    if body is None:
        body = _body(folder, data, config, facts, section)
    return f"---\n{data.to_yaml()}\n---\n\n{body.strip()}\n"


def check_card(folder: Path) -> None:
    """Checks that the figures of a folder's card are those of its `results.json`.

    Args:
        folder (`Path`): Folder with `README.md` and `results.json`.

    Raises:
        [`InvalidConfigError`]: If the card is missing or says other figures, in its metadata or in its text, or the figures are
            another drafter's.
    """
    if not (folder / CARD).is_file():
        raise InvalidConfigError(f"{folder} holds no {CARD}: write it with `specdec card {folder}`")
    results, card = read_results(folder / RESULTS), ModelCard.load(folder / CARD)
    check_drafter(folder, results)
    wrong = []
    if _figures(card.data.eval_results or []) != _figures(eval_results(results)):
        wrong.append("the model-index of its metadata")
    if results_section(results, PLOT if (folder / PLOT).is_file() else None) not in card.text.replace("\r\n", "\n"):
        wrong.append("the section of its text that holds the results")
    if wrong:
        raise InvalidConfigError(
            f"the card in {folder} does not match {RESULTS}: {' and '.join(wrong)} differ. Write it anew with `specdec card "
            f"{folder}`"
        )


def _figures(entries: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((each.dataset_type, each.metric_type, each.metric_name, each.metric_value) for each in entries)


def _with_section(text: str, section: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidConfigError(f"the card has no place for results: put {BEGIN} and {END} into it, or move it away")
    return before + section + after


def _fill(data: Any, folder: Path, config: dict[str, Any], facts: CardFacts) -> None:
    """Writes the metadata. `data` is huggingface_hub's, which takes any attribute."""
    has_code = (folder / "custom_generate" / "generate.py").is_file()
    data.base_model = _hub_id(facts.base_model or data.base_model or target_named(config))
    data.base_model_relation = "adapter"
    data.library_name, data.pipeline_tag = "transformers" if has_code else "hf_specdec", "text-generation"
    data.model_name = facts.name or data.model_name or folder.resolve().name
    data.license = facts.license or data.license
    data.language = list(facts.languages) if facts.languages else data.language
    data.datasets = list(facts.datasets) if facts.datasets else data.datasets
    data.metrics = list(METRICS)
    tags = ["speculative-decoding", "draft-model", *method_of(config).tags, *["custom_generate"] * has_code]
    data.tags = list(dict.fromkeys([*(data.tags or []), *tags]))


def target_named(config: Mapping[str, Any]) -> str | None:
    """What a drafter's config calls its target, in any dialect.

    Args:
        config (`dict`): The contents of its `config.json`.
    """
    named = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return config.get("target_name") or named


def _hub_id(name: str | None) -> str:
    if not name or not is_repo_id(name):
        raise InvalidConfigError(
            f"a card names its target by Hub id, ORG/NAME, got {name!r}: pass --base-model ORG/NAME"
        )
    return name


def _body(folder: Path, data: Any, config: dict[str, Any], facts: CardFacts, section: str) -> str:
    method = method_of(config)
    load, make, options = _LOAD[method.network is not None]
    named = [f"- target: [{data.base_model}](https://huggingface.co/{data.base_model})"]
    named += [f"- revision of the target: {facts.base_revision}"] if facts.base_revision else []
    named += (
        [f"- fingerprint of the target's weights: `{config['target_weights']}`"] if config.get("target_weights") else []
    )
    named += [f"- hash of the tokenizer: `{config['target_tokenizer']}`"] if config.get("target_tokenizer") else []
    named += [f"- method: {method.title}"]
    opening = [f"# {data.model_name}", "", f"A drafter for speculative decoding with {data.base_model}.", "", *named]
    use = [
        "```python",
        "from transformers import AutoModelForCausalLM",
        load,
        "",
        f'target = AutoModelForCausalLM.from_pretrained("{data.base_model}")',
        make.format(name=data.model_name),
        f"target.generate(**inputs, assistant_model=drafter, speculative_config={options})",
        "```",
    ]
    serve = [] if method.network is None else _serving(folder, data.model_name, data.base_model, method.network)
    return "\n".join([*opening, "", "## Use", "", *use, "", *serve, "# Results", "", section])


def _serving(folder: Path, name: str, target: str, network: str) -> list[str]:
    """How the drafter is served: by the folder's own launch lines, or from an export for each engine."""
    if (folder / "serve.md").is_file():
        return ["## Serve", "", "The launch lines are in [serve.md](serve.md).", ""]
    said = (
        "Engines read an export, whose `serve.md` holds the launch line. What an engine would misread is refused. The lines "
        "follow the engines' options; they were not run."
    )
    parts = ["## Serve", "", said, ""]
    for format, engine in _SERVED.items():
        place = f"{network}-{format}"
        line = launch_lines(format, target, network, _STEPS)[engine]
        parts += ["```bash", f"specdec export {name} --format {format} --out {place}", f"cd {place}", line, "```", ""]
    return parts
