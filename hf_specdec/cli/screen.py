"""Where the text of `specdec generate` appears while it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hf_specdec.cli.output import note


if TYPE_CHECKING:
    from hf_specdec.cli.decoding import Answer
    from hf_specdec.rendering import Piece


__all__ = ["ACCEPTED", "Screen"]

ACCEPTED = "green"


class Screen:
    """Where text appears as it is written.

    Args:
        colored (`bool`): Whether accepted drafts are coloured.
        with_stats (`bool`): Whether statistics follow each text.
    """

    def __init__(self, colored: bool, with_stats: bool) -> None:
        self.colored = colored
        self.with_stats = with_stats

    def start(self, index: int, prompts: list[str]) -> None:
        """Names the prompt where there are several, and says once what the colour means."""
        if self.colored and index == 0:
            note(f"{typer.style('green', fg=ACCEPTED)}: drafted and accepted; otherwise the target's own choice")
        if len(prompts) > 1:
            first_line = prompts[index].strip().splitlines()[0]
            note(f"[{index + 1}/{len(prompts)}] {first_line[:100]}")

    def write(self, pieces: list[Piece]) -> None:
        """Appends to the text."""
        for piece in pieces:
            text = typer.style(piece.text, fg=ACCEPTED) if self.colored and piece.accepted else piece.text
            typer.echo(text, nl=False, color=self.colored)

    def finish(self, answer: Answer) -> None:
        """Ends the text."""
        typer.echo()
        if self.with_stats:
            note(answer.summary)
