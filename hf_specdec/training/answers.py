"""Training texts: prompts, with answers that the target itself writes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]

from hf_specdec import SpeculativeConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import mended_lines, whole_lines
from hf_specdec.networks.target import weights_fingerprint
from hf_specdec.placement import device_of
from hf_specdec.sequences import pad_left
from hf_specdec.training.texts import Text
from hf_specdec.warping import whole_law


__all__ = ["answer_prompts", "is_held_out"]


def is_held_out(prompt: str, share: float) -> bool:
    """Whether a prompt is for evaluation only; a hash of its text decides, so it never moves between the two sides.

    Args:
        prompt (`str`): The prompt, before any template.
        share (`float`): Share of all prompts that is held out.
    """
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    return number < share * 2**64


def answer_prompts(
    target: Any,
    prompts: Sequence[Sequence[int]],
    file: Path,
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    drafter: Any = None,
    accelerator: Accelerator | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> list[Text]:
    """Answers of the target, each batch written to `file` at once; what is there is not done again.

    They are decoded speculatively, which does not change them (sampled ones: their distribution): with the drafter where there
    is one, and with prompt lookup.
    Several processes share the prompts; each writes a file of its own beside `file`, and all read all of them.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence[Sequence[int]]`): Token ids, through the target's own chat template where it has one.
        file (`Path`): A `.jsonl` file of prompts and texts as token ids.
        max_new_tokens (`int`): Length of an answer.
        batch_size (`int`): Prompts that are answered at once, padded to one length.
        temperature (`float`): 0 decodes greedily; above it, the target's whole law is sampled at this temperature.
        seed (`int`): With the prompt's tokens, decides the dice of each sampled answer, whatever else stands in its batch.
        drafter (`PreTrainedModel`, *optional*): What drafts for the target.
        accelerator (`Accelerator`, *optional*): Knows the processes that share the work.
        on_answer (`Callable[[int, int], None]`, *optional*): Called with the number of answers so far and of all.

    Raises:
        [`InvalidConfigError`]: If the file holds answers of another length, temperature, seed or target.
    """
    keys = [tuple(prompt) for prompt in prompts]
    about: dict[str, Any] = {"max_new_tokens": max_new_tokens, "target": weights_fingerprint(target)}
    if temperature:
        about |= {"temperature": temperature, "seed": seed}
    known = _known(file, about)
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    own = file
    if accelerator is not None and accelerator.num_processes > 1:
        accelerator.wait_for_everyone()  # all have read before one writes
        own = file.with_stem(f"{file.stem}-{accelerator.process_index}")
        missing = missing[accelerator.process_index :: accelerator.num_processes]
    mended_lines(own)
    with own.open("a", encoding="utf-8") as lines:
        for start in range(0, len(missing), batch_size):
            part = missing[start : start + batch_size]
            for prompt, text in zip(part, _answers(target, part, about, drafter), strict=True):
                lines.write(json.dumps({"prompt": prompt, "text": text, **about}) + "\n")
            lines.flush()
            if on_answer is not None:
                on_answer(len(keys) - len(missing) + start + len(part), len(keys))
        os.fsync(lines.fileno())
    if accelerator is not None:
        accelerator.wait_for_everyone()
    known = _known(file, about)
    return [Text(tuple(known[key]), len(key)) for key in keys if len(known[key]) >= 3]


def _known(file: Path, about: Mapping[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """The answers in `file` and in those that several processes wrote beside it."""
    files = [file, *sorted(file.parent.glob(f"{file.stem}-*{file.suffix}"))]
    rows = [json.loads(line) for each in files for line in whole_lines(each)]
    for name in ("max_new_tokens", "temperature", "seed"):
        asked = about.get(name, 0)  # greedy answers name neither temperature nor seed
        if other := {row.get(name, 0) for row in rows} - {asked}:
            raise InvalidConfigError(
                f"{file} holds answers with the {name} {max(other)}, not {asked}: pass the same, or write to another folder"
            )
    identity = about["target"]
    if identity is not None and {row.get("target") for row in rows} - {None, identity}:
        raise InvalidConfigError(
            f"{file} holds answers of a target with other weights: pass the target that wrote them, or another folder"
        )
    return {tuple(row["prompt"]): row["text"] for row in rows}


def _answers(
    target: Any, prompts: Sequence[tuple[int, ...]], about: Mapping[str, Any], drafter: Any
) -> list[list[int]]:
    """Each prompt with its answer, up to the token that ends it."""
    inputs = pad_left(prompts, 0, device_of(target))
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        speculative_config=SpeculativeConfig(on_drafter_error="raise"),
        row_seeds=[_dice(about.get("seed", 0), prompt) for prompt in prompts],
        **whole_law(about.get("temperature")),
        max_new_tokens=about["max_new_tokens"],
        return_dict_in_generate=True,
    )
    rows, answers = output.speculative_stats.rows, output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [
        [*prompt, *answer[: row.num_new_tokens]] for prompt, row, answer in zip(prompts, rows, answers, strict=True)
    ]


def _dice(seed: int, prompt: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([seed, prompt]).encode()).digest()[:6], "big")
