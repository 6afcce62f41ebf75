"""Trees of drafted tokens: how a dynamic tree grows, and which of its paths the target accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError


__all__ = ["DraftTree", "TreeShape", "acceptance_steps", "accepted_path", "grow_tree", "sampled_child"]


@dataclass(frozen=True)
class TreeShape:
    """Size of a dynamic tree (EAGLE-2, arXiv 2406.16858).

    Args:
        depth (`int`): Layers of drafted tokens.
        top_k (`int`): Nodes of a layer that are expanded, and children that each of them gets.
        total_nodes (`int`): Drafted tokens that are verified.

    Raises:
        [`InvalidConfigError`]: If a number is below 1, or fewer nodes than layers are kept.
    """

    depth: int
    top_k: int
    total_nodes: int

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.total_nodes) < 1:
            raise InvalidConfigError(f"depth, top_k and total_nodes of a tree must be at least 1, got {self}")
        if self.total_nodes < self.depth:
            raise InvalidConfigError(
                f"total_nodes must be at least depth, or no path reaches the last layer: got {self}"
            )


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens with their parents, which come before them.

    Args:
        tokens (`tuple[int, ...]`): Tokens of the nodes.
        parents (`tuple[int, ...]`): Indices of their parents; -1 for the last token of the text.

    Raises:
        `ValueError`: If a parent does not come before its child.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or any(not -1 <= each < i for i, each in enumerate(self.parents)):
            raise ValueError(
                f"each node needs a parent before it, got parents {self.parents} of {len(self.tokens)} tokens"
            )

    def depths(self) -> tuple[int, ...]:
        """1 for the root's children; a node's position is the root's plus its depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def attends(self) -> Tensor:
        """`(1 + nodes, 1 + nodes)`, True where a row sees a column: itself and its ancestors. The root comes first."""
        mask = torch.eye(1 + len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            mask[node + 1] |= mask[parent + 1]
        return mask


def grow_tree(shape: TreeShape, next_log_probs: Callable[[list[tuple[int, ...]]], Tensor]) -> DraftTree:
    """Expands each layer's likeliest nodes, and keeps the likeliest of all (EAGLE-2, section 4; published).

    A node's value is the sum of the log-probabilities on its path. No child is worth more than its parent, and of equals the
    earlier one is kept (ours), so that whatever is kept is connected.

    Args:
        shape ([`TreeShape`]): Size of the tree.
        next_log_probs (`Callable`): From paths below the root to the drafter's log-probabilities `(paths, vocab)` after each.
    """
    paths: list[tuple[int, ...]] = []
    values: list[float] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(shape.depth):
        top = next_log_probs([path for path, _ in frontier]).topk(shape.top_k)
        layer = [
            ((*path, token), value + log_prob)
            for (path, value), tokens, log_probs in zip(
                frontier, top.indices.tolist(), top.values.tolist(), strict=True
            )
            for token, log_prob in zip(tokens, log_probs, strict=True)
        ]
        paths += [path for path, _ in layer]
        values += [value for _, value in layer]
        frontier = sorted(layer, key=lambda each: -each[1])[: shape.top_k]
    best = sorted(range(len(paths)), key=lambda node: -values[node])[: shape.total_nodes]
    kept = [paths[node] for node in sorted(best)]
    places = {path: index for index, path in enumerate(kept)} | {(): -1}
    return DraftTree(tuple(path[-1] for path in kept), tuple(places[path[:-1]] for path in kept))


def accepted_path(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
    """Follows the target's own tokens down the tree. Returns the nodes passed, and the token after them.

    With the target's argmax this is greedy verification. With independent draws from the target's laws it is exact sampling
    for a tree that was not itself drawn, such as [`grow_tree`]'s: what is emitted are the target's draws (ours).

    Args:
        tree ([`DraftTree`]): The tree.
        chosen (`Sequence[int]` of length `1 + nodes`): The target's token after the root and after each node.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in reversed([*enumerate(zip(tree.parents, tree.tokens, strict=True))])
    }
    path, node = [], -1
    while (following := children.get((node, chosen[node + 1]))) is not None:
        path.append(node := following)
    return path, chosen[node + 1]


def acceptance_steps(
    p: Tensor, q: Tensor, candidates: Sequence[int], *, replacement: bool
) -> Iterator[tuple[float, Tensor]]:
    """Recursive rejection over siblings (SpecInfer, arXiv 2305.09781; without replacement as in arXiv 2402.14160).

    Args:
        p (`torch.FloatTensor` of shape `(vocab,)`): The target's law at the parent.
        q (`torch.FloatTensor` of shape `(vocab,)`): The draft's law, from which the siblings were drawn in this order.
        candidates (`Sequence[int]`): The siblings' tokens.
        replacement (`bool`): Whether they were drawn with replacement.

    Yields:
        For each sibling, the probability that it is accepted once all before it were rejected, and the law of the token if it
        is rejected too.
    """
    if not replacement and len(set(candidates)) < len(candidates):
        raise ValueError(f"siblings drawn without replacement are distinct, got {list(candidates)}")
    for token in candidates:
        accepted = min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0
        rest = (p - q).clamp(min=0)
        # Where p equals q nothing is ever rejected, and the law that follows a rejection is of no account.
        p = rest / rest.sum() if rest.sum() > 0 else p
        yield accepted, p
        if not replacement:
            q = q.index_fill(0, torch.tensor([token], device=q.device), 0)
            q = q / q.sum() if q.sum() > 0 else q


def sampled_child(
    p: Tensor, q: Tensor, candidates: Sequence[int], dice: Sequence[float], *, replacement: bool
) -> tuple[int | None, Tensor]:
    """Which sibling is accepted, and the law that the next token is drawn from if none is.

    Args:
        p, q, candidates, replacement: As for [`acceptance_steps`].
        dice (`Sequence[float]`): For each sibling a number that is uniform in `[0, 1)`.
    """
    law = p
    for index, (accepted, law) in enumerate(acceptance_steps(p, q, candidates, replacement=replacement)):
        if dice[index] < accepted:
            return index, law
    return None, law
