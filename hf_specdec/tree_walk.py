"""Verifying a tree: the target's own tokens are followed down it, for as long as they are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.records import Draft
from hf_specdec.sequences import Sequences
from hf_specdec.trees import children_of
from hf_specdec.verify import RandomStreams, choose, throw
from hf_specdec.warping import warp


__all__ = ["TreeWalk", "Walked"]


@dataclass(frozen=True)
class Walked:
    """What came of a walk.

    Args:
        emitted (`list[list[int]]`): New tokens of each row, cut where the row stopped.
        path (`torch.LongTensor` of shape `(batch, depth)`): Nodes accepted and kept, from the root on; -1 after the last.
        num_verified (`torch.LongTensor` of shape `(batch,)`): Nodes of the path, and one for children that were all rejected.
    """

    emitted: list[list[int]]
    path: Tensor
    num_verified: Tensor


@dataclass(frozen=True)
class TreeWalk:
    """Draws the target's token after the committed ones, then after the node that holds it, and so on (ours).

    What is emitted are the target's own draws, so that greedy texts are its own token by token and sampled ones have its law,
    whatever the tree: it decides only how many draws one pass is good for. A node's siblings together are accepted as often as
    by EAGLE's rule, which tries them one after another as point masses (published). A row throws one number for each
    token, so that a seed gives the same text with trees of any size.

    Args:
        texts ([`Sequences`]): The texts, which grow.
        processors (`LogitsProcessorList`): The target's processors. Each node's logits are processed with its own prefix.
        do_sample (`bool`): Whether the target samples.
        streams ([`RandomStreams`], *optional*): The dice.
        add (`Callable`): Told each step's scores and logits, `(batch, vocab)`, where they are recorded.
        given_scores (`Callable`): The recorded scores of all steps, for criteria that look at them.
    """

    texts: Sequences
    processors: LogitsProcessorList
    do_sample: bool
    streams: RandomStreams | None
    add: Callable[[Tensor, Tensor], None]
    given_scores: Callable[[], tuple[Tensor, ...] | None]

    def in_step(self, draft: Draft, logits: Tensor) -> Walked:
        """All rows together, one position after another, until some row stops or leaves its tree."""
        texts, rows = self.texts, range(self.texts.batch_size)
        steps = _Steps(draft, texts.batch_size)
        emitted: list[list[int]] = [[] for _ in rows]
        while True:
            going = texts.active
            raw = steps.logits_of(logits)
            shown = raw.clone() if self.processors else raw  # a processor may write into what it is shown
            scores = self.processors(texts.prefix, shown) if self.processors else raw
            self.add(scores, shown)
            tokens = self._choose(scores, going)
            for row, token in enumerate(texts.append_step(tokens, self.given_scores())):
                emitted[row].extend(token)
            steps.follow(tokens, going)
            ended = going & ~texts.active
            if bool(ended.any()) or not bool(steps.inside[texts.active].all()):
                return Walked(emitted, steps.path(), steps.num_verified)

    def by_row(self, draft: Draft, logits: Tensor) -> Walked:
        """Each row on its own, until it leaves its tree; a criterion may stop it before."""
        texts, going = self.texts, self.texts.unfinished.clone()
        steps = _Steps(draft, texts.batch_size)
        proposed: list[list[int]] = [[] for _ in range(texts.batch_size)]
        while bool(going.any()):
            raw = steps.logits_of(logits)
            prefix = _with_tokens(texts, proposed)
            lengths = texts.lengths + torch.tensor([len(each) for each in proposed])
            scores = warp(self.processors, prefix, lengths, raw[:, None])[:, 0]
            if texts.batch_size == 1:
                steps.recorded.append((scores, raw))
            tokens = self._choose(scores, going)
            for row in going.nonzero()[:, 0].tolist():
                proposed[row].append(int(tokens[row]))
            steps.follow(tokens, going)
            going = going & steps.inside
        emitted = texts.append_rows(proposed)
        counts = torch.tensor([len(each) for each in emitted])
        for scores, raw in steps.recorded[: int(counts[0])]:
            self.add(scores, raw)
        path = steps.path()
        path = path.masked_fill(torch.arange(path.shape[1]) >= counts[:, None], -1)
        return Walked(emitted, path, torch.minimum(steps.num_verified, counts))

    def _choose(self, scores: Tensor, rows: Tensor) -> Tensor:
        return choose(scores, self.do_sample, throw(self.streams if self.do_sample else None, rows, len(rows))).cpu()


class _Steps:
    """Where each row stands in its tree."""

    def __init__(self, draft: Draft, batch_size: int) -> None:
        self._children: list[Mapping[tuple[int, int], int]] = [children_of(draft, row) for row in range(batch_size)]
        self._parents = [{parent for parent, _ in children} for children in self._children]
        self._nodes = torch.full((batch_size,), -1)
        self._passed: list[Tensor] = []
        self.inside = torch.ones(batch_size, dtype=torch.bool)
        self.num_verified = torch.zeros(batch_size, dtype=torch.long)
        self.recorded: list[tuple[Tensor, Tensor]] = []

    def logits_of(self, logits: Tensor) -> Tensor:
        """`(batch, vocab)`, those after each row's place."""
        return logits[torch.arange(len(logits)), (self._nodes + 1).to(logits.device)]

    def follow(self, tokens: Tensor, rows: Tensor) -> None:
        """Moves each of the `rows` that is still inside to the child that holds its token, if there is one."""
        following = torch.full_like(self._nodes, -1)
        for row in (rows & self.inside).nonzero()[:, 0].tolist():
            here = int(self._nodes[row])
            following[row] = self._children[row].get((here, int(tokens[row])), -1)
            self.num_verified[row] += here in self._parents[row]
        self.inside = self.inside & (following >= 0)
        self._nodes = torch.where(self.inside, following, self._nodes)
        self._passed.append(following)

    def path(self) -> Tensor:
        """`(batch, steps)`, the nodes passed."""
        return torch.stack(self._passed, -1) if self._passed else torch.zeros(len(self._nodes), 0, dtype=torch.long)


def _with_tokens(texts: Sequences, proposed: list[list[int]]) -> Tensor:
    """The committed tokens with what each row proposes after them."""
    width = max(map(len, proposed))
    tokens = torch.zeros(texts.batch_size, width, dtype=torch.long)
    for row, each in enumerate(proposed):
        tokens[row, : len(each)] = torch.tensor(each, dtype=torch.long)
    return texts.with_draft(Draft(tokens, torch.tensor([len(each) for each in proposed])))
