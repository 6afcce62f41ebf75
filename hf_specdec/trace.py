"""How each token of a text was decided, as pieces, for a terminal, or as a page."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_specdec.rendering import TextPieces


if TYPE_CHECKING:
    from rich.text import Text

    from hf_specdec.records import Round


__all__ = ["DECISIONS", "Decision", "DecodingTrace", "TracedPiece", "decisions", "html_page"]

Decision = Literal["accepted", "rescued", "resampled", "bonus", "target"]

DECISIONS: dict[Decision, str] = {
    "accepted": "a draft that the exact rule would have kept too",
    "rescued": "a draft that only the relaxed rule kept",
    "resampled": "drawn in place of a rejected draft",
    "bonus": "the target's own token after a draft that was accepted whole",
    "target": "the target's own token where nothing was drafted",
}
_COLORS: dict[Decision, str] = {
    "accepted": "#1a7f37",
    "rescued": "#bf8700",
    "resampled": "#cf222e",
    "bonus": "#0969da",
    "target": "#6e7781",
}
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; line-height: 1.5 }}
pre {{ white-space: pre-wrap; background: #f6f8fa; padding: 1em }}
.prompt {{ color: #6e7781 }}
{styles}
</style></head><body>
<h1>{title}</h1>
<ul>
{legend}
</ul>
{sections}
</body></html>
"""


@dataclass(frozen=True)
class TracedPiece:
    """A piece of new text.

    Args:
        text (`str`): Whole characters.
        decision (`str`): How the token that completed it was decided, see `DECISIONS`.
        step_tv (`float`, *optional*): Total variation of the law it was drawn from to the target's, where that was measured.
    """

    text: str
    decision: Decision
    step_tv: float | None = None


def decisions(round_: Round, row: int = 0) -> list[Decision]:
    """How each token that a round emitted in a row was decided. Rescued drafts are told apart with `diagnostics=True`."""
    num_accepted, num_verified = int(round_.num_accepted[row]), int(round_.num_verified[row])
    rescued = round_.marks["rescued"][row].tolist() if "rescued" in round_.marks else [False] * num_accepted
    found: list[Decision] = ["rescued" if rescued[place] else "accepted" for place in range(num_accepted)]
    own: Decision = "target"
    if num_verified > num_accepted:
        own = "resampled"
    elif num_verified > 0:
        own = "bonus"
    return found + [own] * (len(round_.emitted[row]) - num_accepted)


class DecodingTrace:
    """Collects the rounds of a run: `generate(..., round_callback=trace.add)`. Ours.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        prompt (sequence of `int`): The row's prompt.
        row (`int`): Which row of the batch.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), row: int = 0) -> None:
        self.row = row
        self.counts: Counter[Decision] = Counter()
        self._text = TextPieces(tokenizer, prompt)
        self._pieces: list[TracedPiece] = []

    def add(self, round_: Round) -> None:
        """Takes one round."""
        judged = int(round_.num_verified[self.row])  # a bonus token was not
        costs = round_.marks["step_tv"][self.row, :judged].tolist() if "step_tv" in round_.marks else []
        for place, (token, decision) in enumerate(
            zip(round_.emitted[self.row], decisions(round_, self.row), strict=True)
        ):
            cost = costs[place] if place < len(costs) and not math.isnan(costs[place]) else None
            self.counts[decision] += 1
            self._pieces += [TracedPiece(piece.text, decision, cost) for piece in self._text.push([token])]

    @property
    def pieces(self) -> list[TracedPiece]:
        """The text so far; joined, it is the decoded text but for the beginning of a character that is not whole yet."""
        return list(self._pieces)

    def to_dict(self) -> dict[str, Any]:
        """Counts and pieces as plain Python values, ready for JSON."""
        pieces = [{"text": each.text, "decision": each.decision, "step_tv": each.step_tv} for each in self._pieces]
        return {"counts": {name: self.counts[name] for name in DECISIONS}, "pieces": pieces}

    def to_rich(self) -> Text:
        """The coloured text for a terminal, to be printed by a `rich.console.Console`."""
        from rich.text import Text

        text = Text()
        for piece in self._pieces:
            text.append(piece.text, style=_COLORS[piece.decision])
        return text

    def legend(self) -> Text:
        """What the colours mean and how often each occurred, one line each."""
        from rich.text import Text

        lines = [
            Text.assemble((name, _COLORS[name]), f": {self.counts[name]}, {DECISIONS[name]}")
            for name in DECISIONS
            if self.counts[name]
        ]
        return Text("\n").join(lines)

    def to_html(self, prompt: str = "", title: str = "Decoding trace") -> str:
        """A page of its own, with no script and nothing to load."""
        return html_page([(prompt, self)], title)


def html_page(traces: Iterable[tuple[str, DecodingTrace]], title: str = "Decoding trace") -> str:
    """A page with one section for each prompt and its trace; the distance of a step shows when one points at its token."""
    traces = list(traces)
    total = sum((trace.counts for _, trace in traces), Counter[Decision]())
    legend = [
        f'<li><span class="{name}">{name}</span>: {total[name]}, {html.escape(what)}</li>'
        for name, what in DECISIONS.items()
    ]
    return _PAGE.format(
        title=html.escape(title),
        styles="\n".join(f".{name} {{ color: {color} }}" for name, color in _COLORS.items()),
        legend="\n".join(legend),
        sections="\n".join(_section(prompt, trace) for prompt, trace in traces),
    )


def _section(prompt: str, trace: DecodingTrace) -> str:
    spans = []
    for piece in trace.pieces:
        told = piece.decision if piece.step_tv is None else f"{piece.decision}, total variation {piece.step_tv:.4f}"
        spans.append(f'<span class="{piece.decision}" title="{told}">{html.escape(piece.text)}</span>')
    return f'<pre><span class="prompt">{html.escape(prompt)}</span>\n{"".join(spans)}</pre>'
