"""Tokens per second of plain decoding and of several drafters, in turn, in one process."""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_specdec import RCSDConfig, pack_linears
from hf_specdec.files import mended_lines, write_at_once
from hf_specdec.loading import load_assistant
from hf_specdec.quality.drafters.workshop import weights_digest
from hf_specdec.quality.statistics import bootstrap_mean


__all__ = ["measure_pace"]

PLAIN = "plain"
_WARM_UP = 12  # tokens


def measure_pace(
    target: Any,
    folders: Mapping[str, Path],
    prompts: Sequence[Sequence[int]],
    kept: Path,
    *,
    baseline: str,
    steps: int,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Decodes each prompt plainly and with every drafter, the order turned round each time, greedily.

    Plain decoding runs on the same layers, packed for the CPU where that pays ([`pack_linears`]), in the number of threads that
    PyTorch has now. Times are those of whole `generate` calls.

    Args:
        target (`PreTrainedModel`): The target, which stays as it is: a packed copy decodes.
        folders (`Mapping[str, Path]`): By name, the folders of drafters.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        kept (`Path`): Folder of finished rows; those of other drafters, prompts or lengths are not read. A prompt that a killed
            run left in the middle is timed anew, so that what is compared was timed by one process.
        baseline (`str`): The drafter that the others are compared with, besides plain decoding.
        steps (`int`): Drafts per round.
        max_new_tokens (`int`): Length of the answers.
        repeats (`int`): How often each prompt is decoded each way.
        progress (`Callable[[int, int], None]`, *optional*): Called with the number of prompts so far and of all.

    Returns:
        `dict`: `arms`: by arm, the medians over prompts (of the medians over repeats) of `tokens_per_second`, of `speedup`
        over plain decoding and of `speedup_over_baseline`, with the 95 % bootstrap interval of the latter's mean, and
        `same_text`, whether every answer is that of plain decoding; and `steps`, `repeats`, `num_prompts`, `threads`.
    """
    names = [PLAIN, *folders]
    drafters = {name: weights_digest(folder) for name, folder in folders.items()}
    threads = torch.get_num_threads()
    about = [drafters, [list(each) for each in prompts], steps, max_new_tokens, threads]
    file = kept / f"pace-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.jsonl"
    rows = [json.loads(line) for line in mended_lines(file)]
    rows = rows[: len(rows) - len(rows) % len(names)]
    write_at_once(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    turns, done = len(prompts) * repeats, len(rows) // len(names)
    if done < turns:
        runs = _runs(target, folders, steps, prompts[0])
    with file.open("a") as lines:
        for turn in range(done, turns):
            number = turn % len(prompts)
            for name in names if (turn + turn // len(prompts)) % 2 == 0 else reversed(names):
                started = time.perf_counter()
                answer = runs[name](prompts[number], max_new_tokens)
                row = {"prompt": number, "arm": name, "seconds": time.perf_counter() - started, "answer": answer}
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
            lines.flush()
            progress(turn + 1, turns)
    figures = {name: _figures(rows, name, baseline) for name in names}
    return {"arms": figures, "steps": steps, "repeats": repeats, "num_prompts": len(prompts), "threads": threads}


def _runs(
    target: Any, folders: Mapping[str, Path], steps: int, prompt: Sequence[int]
) -> dict[str, Callable[[Sequence[int], int], list[int]]]:
    """By name, what decodes a prompt; each has decoded a few tokens already."""
    packed = copy.deepcopy(target)
    pack_linears(packed)
    ways: dict[str, dict[str, Any]] = {PLAIN: {}} | {
        name: {
            "assistant_model": load_assistant(folder, packed),
            "speculative_config": RCSDConfig(steps=steps, on_drafter_error="raise"),
        }
        for name, folder in folders.items()
    }

    def run(way: dict[str, Any], tokens: Sequence[int], max_new_tokens: int) -> list[int]:
        ids = torch.tensor([list(tokens)])
        found = packed.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **way,
        )
        answer: list[int] = found[0, ids.shape[1] :].tolist()
        return answer

    for way in ways.values():
        run(way, prompt, _WARM_UP)
    return {name: partial(run, way) for name, way in ways.items()}


def _figures(rows: Sequence[Mapping[str, Any]], name: str, baseline: str) -> dict[str, Any]:
    own, plain, base = (_by_prompt(rows, each) for each in (name, PLAIN, baseline))
    tokens = {row["prompt"]: row["answer"] for row in rows if row["arm"] == PLAIN}
    gains = [base[prompt] / own[prompt] for prompt in own]
    return {
        "tokens_per_second": statistics.median(len(tokens[prompt]) / own[prompt] for prompt in own),
        "speedup": statistics.median(plain[prompt] / own[prompt] for prompt in own),
        "speedup_over_baseline": statistics.median(gains),
        "interval_over_baseline": asdict(bootstrap_mean(gains)),
        "same_text": all(row["answer"] == tokens[row["prompt"]] for row in rows if row["arm"] == name),
    }


def _by_prompt(rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Median seconds of each prompt."""
    seconds: dict[int, list[float]] = {}
    for row in rows:
        if row["arm"] == name:
            seconds.setdefault(row["prompt"], []).append(row["seconds"])
    return {prompt: statistics.median(each) for prompt, each in seconds.items()}
