"""One prompt after another through `generate`, with text that appears as it is decoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.models import Models
from hf_specdec.rendering import Piece, TextPieces


if TYPE_CHECKING:
    from hf_specdec.configs import BaseConfig
    from hf_specdec.records import Round
    from hf_specdec.stats import SpeculativeStats


__all__ = ["Answer", "Decoding", "sampling_options"]

Show = Callable[[list[Piece]], None]


@dataclass(frozen=True)
class Answer:
    """What was written for one prompt.

    Args:
        prompt, text (`str`): The prompt as given, and the new text without special tokens.
        tokens (`list[int]`): New tokens.
        stats (`dict`): Statistics of the run; for plain decoding tokens and time only.
        summary (`str`): The same in words.
    """

    prompt: str
    text: str
    tokens: list[int]
    stats: dict[str, Any]
    summary: str

    def to_dict(self) -> dict[str, Any]:
        """Everything but the summary."""
        return {"prompt": self.prompt, "text": self.text, "tokens": self.tokens, "stats": self.stats}


@dataclass(frozen=True)
class Decoding:
    """How prompts are decoded.

    Args:
        models ([`Models`]): Target, drafter and tokenizer.
        config ([`BaseConfig`], *optional*): The speculative method; None decodes plainly.
        options (`dict`): Options of `generate`.
        seed (`int`, *optional*): Every prompt's random numbers start from it.
    """

    models: Models
    config: BaseConfig | None
    options: dict[str, Any]
    seed: int | None = None

    def run(
        self,
        prompt: str,
        tokens: list[int],
        show: Show | None = None,
        on_round: Callable[[Round], None] = lambda round_: None,
    ) -> Answer:
        """Continues one prompt, given as text and as token ids; `show` is called with new text as it is decoded, `on_round`
        with each round."""
        import torch

        from hf_specdec.placement import device_of

        if self.seed is not None:
            torch.manual_seed(self.seed)
        written = _Written(TextPieces(self.models.tokenizer, tokens), show)
        ids = torch.tensor([tokens], device=device_of(self.models.target))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.options}
        started = time.perf_counter()
        if self.config is None:
            self.models.target.generate(**inputs, streamer=_PlainStreamer(written))
            stats = _plain_stats(len(written.tokens), time.perf_counter() - started)
            summary = f"{len(written.tokens)} tokens in {stats['total_seconds']:.2f} s, plain decoding "
            summary += f"({stats['tokens_per_second']:.1f} tokens/s)"
        else:
            found: list[SpeculativeStats] = []

            def add_round(round_: Round) -> None:
                written.add_round(round_)
                on_round(round_)

            self.models.target.generate(
                **inputs,
                speculative_config=self.config,
                assistant_model=self.models.assistant,
                tokenizer=self.models.tokenizer,
                round_callback=add_round,
                stats_callback=found.append,
            )
            stats, summary = found[0].to_dict(), found[0].summary()
        written.end()
        return Answer(prompt, written.text, written.tokens, stats, summary)


@dataclass
class _Written:
    """The new tokens and their text so far."""

    pieces: TextPieces
    show: Show | None
    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def add_round(self, round_: Round) -> None:
        self.tokens += round_.emitted[0]
        self._take(self.pieces.push_round(round_))

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._take(self.pieces.push([token]))

    def end(self) -> None:
        self._take(self.pieces.end())

    def _take(self, pieces: list[Piece]) -> None:
        self.text += "".join(piece.text for piece in pieces)
        if self.show is not None and pieces:
            self.show(pieces)


class _PlainStreamer:
    """A streamer of plain decoding: the first `put` is the prompt, each later one a token."""

    def __init__(self, written: _Written) -> None:
        self.written = written
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        if self._saw_prompt:
            self.written.add_token(int(value))
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing is held back here."""


def sampling_options(sample: bool, options: dict[str, float | int | None]) -> dict[str, Any]:
    """Options of `generate` that say how tokens are chosen; what is not given is the checkpoint's own."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and not sample:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(f"{names} needs --sample: decoding is greedy without it")
    if given.get("temperature") == 0.0:
        raise CommandError("--temperature 0 is greedy decoding: drop --sample and --temperature")
    return {"do_sample": sample, **given}


def _plain_stats(num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "num_new_tokens": num_tokens,
        "total_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds else 0.0,
    }
