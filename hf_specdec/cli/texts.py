"""Prompts and texts from the command line, files and standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.cli.errors import CommandError


__all__ = ["encode_prompt", "guess_field", "read_pairs", "read_prompts", "read_texts"]


def read_prompts(
    prompts: list[str] | None,
    file: Path | None,
    field: str,
    limit: int | None,
    *,
    default: tuple[str, ...] = (),
) -> list[str]:
    """Prompts given one by one, or in a file; else `default`, else standard input as a single prompt.

    Raises:
        [`CommandError`]: If there are none, or several sources.
    """
    if prompts and file:
        raise CommandError("--prompt and --file both say what to continue: pass one of them")
    if prompts:
        found = list(prompts)
    elif file:
        found = read_texts(file, field, limit)
    elif default:
        found = list(default)
    else:
        if sys.stdin.isatty():
            raise CommandError("there is no prompt: pass --prompt TEXT or --file FILE, or write to standard input")
        found = [sys.stdin.read().strip("\n")]
    found = [text for text in found if text.strip()][:limit]
    if not found:
        raise CommandError("every prompt is empty")
    return found


def read_texts(file: Path, field: str, limit: int | None = None) -> list[str]:
    """The lines of a text file, or one field of each line of a `.jsonl` file."""
    if file.suffix != ".jsonl":
        lines = file.read_text(encoding="utf-8").splitlines()
        return _some([line for line in lines if line.strip()], file)[:limit]
    return [_field(row, field, file, number) for number, row in _rows(file, limit)]


def guess_field(file: Path, candidates: Sequence[str]) -> str:
    """The first of some fields that holds a text in the first row of a `.jsonl` file; the very first where none does."""
    if file.suffix != ".jsonl":
        return candidates[0]
    [(_, row)] = _rows(file, 1)
    return next((name for name in candidates if isinstance(row.get(name), str)), candidates[0])


def read_pairs(file: Path, prompt_field: str, field: str, limit: int | None = None) -> list[tuple[str, str]]:
    """Two fields of each line of a `.jsonl` file: a prompt and the text that follows it."""
    if file.suffix != ".jsonl":
        raise CommandError(f"--prompt-field names a field of a .jsonl file, and {file.name} is none")
    return [
        (_field(row, prompt_field, file, number), _field(row, field, file, number))
        for number, row in _rows(file, limit)
    ]


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    chat: bool | None,
    system: str | None = None,
    examples: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt's token ids, through the chat template where it is wanted; `examples` are turns of user and model that go
    before it.

    Raises:
        [`CommandError`]: If a template is asked for and there is none.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if not (has_template if chat is None else chat):
        if system is not None:
            raise CommandError("--system needs the chat template, which is off here")
        if examples:
            raise CommandError("--examples needs a chat template, which shows where an answer ends: pass --examples 0")
        return list(tokenizer(prompt)["input_ids"])
    if not has_template:
        raise CommandError("this tokenizer has no chat template: pass --no-chat")
    messages = [
        {"role": role, "content": text}
        for example in examples
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    messages.append({"role": "user", "content": prompt})
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rows(file: Path, limit: int | None) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CommandError(f"{file.name}, line {number} is not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise CommandError(f"{file.name}, line {number} must hold one JSON object, got {type(row).__name__}")
        rows.append((number, row))
        if len(rows) == limit:
            break
    return _some(rows, file)


def _field(row: dict[str, Any], field: str, file: Path, number: int) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        strings = sorted(key for key, each in row.items() if isinstance(each, str))
        raise CommandError(
            f"{file.name}, line {number} has no text in the field {field!r}: choose another with --field "
            f"(there are {', '.join(strings) or 'none'})"
        )
    return value


def _some(found: list[Any], file: Path) -> list[Any]:
    if not found:
        raise CommandError(f"{file.name} holds no text")
    return found
