"""Measures self-drafting on a model: `python -m hf_specdec.bench.self_draft --target FOLDER --prompts FILE --out PREFIX`.

Three arms decode the same prompts in turn: plain, self-drafting with raw exits, and the same with prompt lookup where no exit
is confident (`drafting="hybrid"`). They do so with torch's own linears, and with packed ones where a layer is large enough
for that; speeds compare arms with the same linears. Models that `PREFIX.json` holds already stay in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.bench.arms import Arm
from hf_specdec.bench.plots import plot
from hf_specdec.bench.report import markdown, report_paths, versions
from hf_specdec.bench.runner import Benchmark, Row
from hf_specdec.bench.summary import summarize
from hf_specdec.configs import SelfDraftConfig, load_config
from hf_specdec.files import write_at_once
from hf_specdec.linear import pack_linears


__all__ = ["arms_of", "measure", "write_results"]


def arms_of(config: SelfDraftConfig) -> list[Arm]:
    """Plain decoding, the config, and the config with prompt lookup behind it."""
    options = vars(config) | {"drafting": "hybrid"}
    return [Arm("plain"), Arm("self-draft", config), Arm("self-draft-hybrid", SelfDraftConfig(**options))]


def measure(
    name: str, target: Any, tokenizer: Any, texts: list[str], config: SelfDraftConfig, max_new_tokens: int
) -> tuple[dict[str, dict[str, dict[str, Any]]], dict[str, list[Row]]]:
    """Figures and rows by model and kind of linears. The target's linears are packed in the end.

    Args:
        name (`str`): What to call the model.
        target (`PreTrainedModel`): The model, with torch's own linears.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        texts (`list[str]`): Prompts.
        config ([`SelfDraftConfig`]): The arm between plain and hybrid.
        max_new_tokens (`int`): Tokens per prompt.
    """
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rows = {}
    for linears in ("torch's linears", "packed linears"):
        if linears == "packed linears" and not pack_linears(target).num_packed:
            continue
        Benchmark(target, None, tokenizer, prompts[:1], arms_of(config), 8).run()  # warms up
        rows[f"{name}, {linears}"] = Benchmark(target, None, tokenizer, prompts, arms_of(config), max_new_tokens).run()
    return {key: summarize(each, None) for key, each in rows.items()}, rows


def write_results(
    prefix: Path, summary: dict[str, Any], rows: dict[str, list[Row]], about: dict[str, Any]
) -> list[Path]:
    """Writes `PREFIX.json`, `PREFIX.md` and `PREFIX.png`: these models, and those that the JSON file holds already.

    Args:
        prefix (`Path`): Path without suffix.
        summary, rows (`dict`): As [`measure`] gives them.
        about (`dict`): What the figures were measured with.
    """
    paths = report_paths(prefix)
    known = json.loads(paths[0].read_text(encoding="utf-8")) if paths[0].exists() else {}
    content = {
        "summary": known.get("summary", {}) | summary,
        "environment": known.get("environment", {}) | dict.fromkeys(summary, about),
        "rows": [row for row in known.get("rows", []) if row["model"] not in summary]
        + [{"model": name, **asdict(row)} for name, each in rows.items() for row in each],
    }
    write_at_once(paths[0], (json.dumps(content, indent=1) + "\n").encode())
    write_at_once(paths[1], markdown(content["summary"], content["environment"]).encode())
    write_at_once(paths[2], plot(content["summary"]))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of a causal LM")
    parser.add_argument("--name", help="what to call it; by default the folder's name")
    parser.add_argument("--config", type=Path, help="folder of a saved SelfDraftConfig; its defaults otherwise")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON Lines, {"prompt": ...}, or a JSON list, {"text": ...}'
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    arguments = parser.parse_args()
    config = SelfDraftConfig() if arguments.config is None else load_config(str(arguments.config))
    if not isinstance(config, SelfDraftConfig):
        parser.error(f"--config must be a SelfDraftConfig, got {type(config).__name__}")
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32, use_safetensors=True).eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(arguments.target), _texts(arguments.prompts)
    name = arguments.name or arguments.target.name
    summary, rows = measure(name, target, tokenizer, texts, config, arguments.max_new_tokens)
    about = _about(config, len(texts), arguments.max_new_tokens)
    paths = write_results(arguments.out, summary, rows, about)
    for key, arms in summary.items():
        speeds = ", ".join(f"{arm} {figures['speedup']:.3f}x" for arm, figures in arms.items())
        sys.stdout.write(f"{key}: {speeds}\n")
    sys.stdout.write(f"Written: {', '.join(map(str, paths))}\n")


def _texts(path: Path) -> list[str]:
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return [each["text"] for each in json.loads(content)]
    return [json.loads(line)["prompt"] for line in content.splitlines() if line.strip()]


def _about(config: SelfDraftConfig, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    exits = "+".join(map(str, config.exit_layers or ()))
    return {
        "config": f"exits {exits}, tau {config.confidence_threshold}, alpha {config.annealing}, width {config.max_width}, "
        f"length {config.length}",
        "decoding": f"greedy, {max_new_tokens} new tokens at most, fp32, batch 1, {torch.get_num_threads()} thread",
        "prompts": num_prompts,
        "date": date.today().isoformat(),
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
