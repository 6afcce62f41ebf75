"""What a frozen target shows along texts that evaluate again and again, read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["MOST_BYTES", "HeldOut", "Seen"]

MOST_BYTES = 2**30


@dataclass(frozen=True)
class Seen:
    """What an evaluation needs of one text. Laws are made of states each time: they are as wide as the vocabulary.

    Args:
        states (`dict[int, torch.FloatTensor]`): By exit, the hidden states `(1, columns, hidden_size)`.
        final (`torch.FloatTensor` of shape `(1, positions, hidden_size)`): What the final norm sees where it counts.
        best (`torch.LongTensor` of shape `(1, positions)`): The target's argmax over its whole vocabulary.
    """

    states: dict[int, Tensor]
    final: Tensor
    best: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        return sum(each.numel() * each.element_size() for each in (*self.states.values(), self.final, self.best))


@final
class HeldOut:
    """Texts as their target sees them, each read when it is first asked for and then kept in the CPU's memory, in the target's
    dtype: `(exits + 1) * hidden_size` numbers a token.

    Args:
        observer ([`Observer`]): Reads the texts. Its target must not change meanwhile.
        texts (`Sequence[Text]`): The texts.
        most_bytes (`int`): Memory for what is kept; texts beyond it are read anew each time.
    """

    def __init__(self, observer: Observer, texts: Sequence[Text], most_bytes: int = MOST_BYTES) -> None:
        self.observer, self.texts, self.most_bytes = observer, texts, most_bytes
        self._kept: dict[int, Seen] = {}
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Seen]:
        for index, text in enumerate(self.texts):
            yield self._kept[index] if index in self._kept else self._read(index, text)

    def _read(self, index: int, text: Text) -> Seen:
        target, observed = self.observer.target, self.observer.observe(text, whole=True)
        states = {depth: each.to(target.dtype) for depth, each in observed.states.items()}
        seen = Seen(states, observed.final.to(target.dtype), observed.logits.argmax(-1))
        if self._num_bytes + seen.num_bytes <= self.most_bytes:
            states = {depth: each.cpu() for depth, each in states.items()}
            self._kept[index] = Seen(states, seen.final.cpu(), seen.best.cpu())
            self._num_bytes += seen.num_bytes
        return seen
