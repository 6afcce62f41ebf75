"""Reading prompts from the usual evaluation files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError


__all__ = ["encode", "read_prompts"]

_FIELDS = ("prompt", "question", "problem", "instruction", "text", "turns")


def read_prompts(path: str | Path, field: str | None = None, limit: int | None = None) -> list[str]:
    """The prompts of a `.jsonl` file (one object a line) or of a text file (one prompt a line).

    Args:
        path (`str` or `Path`): The file.
        field (`str`, *optional*): The key to read; by default the first of prompt, question, problem, instruction, text,
            turns that is there. Of a list (`turns`) the first entry is taken.
        limit (`int`, *optional*): Read only so many.

    Raises:
        [`InvalidConfigError`]: If a line has no such field, naming the line.
    """
    prompts: list[str] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_prompt_of(json.loads(line), field, number) if str(path).endswith(".jsonl") else line)
    if not prompts:
        raise InvalidConfigError(f"{Path(path).name} holds no prompts")
    return prompts


def _prompt_of(entry: dict[str, Any], field: str | None, number: int) -> str:
    names = _FIELDS if field is None else (field,)
    for name in names:
        if name in entry:
            value = entry[name]
            return str(value[0] if isinstance(value, list) else value)
    raise InvalidConfigError(
        f"line {number} has none of the fields {', '.join(names)}; it has {', '.join(sorted(entry))}"
    )


def encode(tokenizer: Any, prompt: str, *, chat: bool = True) -> Any:
    """`{"input_ids", "attention_mask"}` of one prompt, through the chat template where there is one."""
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return tokenizer(prompt, return_tensors="pt")
