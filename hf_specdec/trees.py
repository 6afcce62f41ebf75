"""Trees of drafted tokens: how a dynamic tree grows, and what its nodes see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.errors import DrafterError, InvalidConfigError
from hf_specdec.records import Draft


__all__ = ["TreeShape", "ancestors", "children_of", "grow_tree"]


@dataclass(frozen=True)
class TreeShape:
    """Size of a dynamic tree (EAGLE-2, arXiv 2406.16858).

    The defaults are those of EAGLE's code (published) but for `depth`, which there is 7 or 5.

    Args:
        depth (`int`): Layers of drafted tokens.
        top_k (`int`): Nodes of a layer that are expanded, and children that each of them gets.
        total_nodes (`int`): Drafted tokens that are verified.

    Raises:
        [`InvalidConfigError`]: If a number is below 1, or fewer nodes than layers are kept.
    """

    depth: int = 6
    top_k: int = 10
    total_nodes: int = 59

    def __post_init__(self) -> None:
        numbers = (self.depth, self.top_k, self.total_nodes)
        if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers) or min(numbers) < 1:
            raise InvalidConfigError(
                f"depth, top_k and total_nodes of a tree must be integers of at least 1, got {self}"
            )
        if self.total_nodes < self.depth:
            raise InvalidConfigError(
                f"total_nodes must be at least depth, or no path reaches the last layer: got {self}"
            )


def grow_tree(
    shape: TreeShape,
    log_probs: Tensor,
    expand: Callable[[Tensor, Tensor], Tensor],
    room: Tensor,
    end_tokens: Sequence[int] = (),
) -> Draft:
    """Expands each layer's likeliest nodes, and keeps the likeliest of all (EAGLE-2, section 4; published).

    A node's value is the sum of the log-probabilities on its path. No child is worth more than its parent, and of equals the
    earlier one is kept (ours), so that whatever is kept is connected. Nodes are ordered by value (ours; EAGLE orders them
    by layer), so that the first ones of a tree are the smaller tree. Nothing follows a token that ends a text (ours).

    Args:
        shape ([`TreeShape`]): Size of the tree.
        log_probs (`torch.FloatTensor` of shape `(batch, vocab)`): The drafter's law after the committed tokens; `-inf` for
            what cannot be drafted.
        expand (`Callable`): From the tokens of a layer `(batch, nodes)` and the places of their parents in the layer before,
            0 for all of the first layer's, to the drafter's log-probabilities `(batch, nodes, vocab)` after each.
        room (`torch.LongTensor` of shape `(batch,)`): Layers that each row may draft; 0 for none.
        end_tokens (`Sequence[int]`): Tokens that end a text.

    Raises:
        [`DrafterError`]: If a law contains NaN.
    """
    device, batch_size = log_probs.device, len(log_probs)
    top_k = min(shape.top_k, log_probs.shape[-1])
    depth, room = min(shape.depth, int(room.max())), room.to(device)[:, None]
    ends = torch.tensor(end_tokens, dtype=torch.long, device=device)
    best = log_probs.topk(top_k)
    layer_values, layer_tokens = best.values.masked_fill(room < 1, -torch.inf), best.indices
    layer_nodes, places = torch.arange(top_k, device=device).expand(batch_size, -1), torch.zeros_like(layer_tokens)
    tokens, values, parents = [layer_tokens], [layer_values], [torch.full_like(layer_tokens, -1)]
    for layer in range(2, depth + 1):
        best = expand(layer_tokens, places).topk(top_k)
        closed = (room < layer) | torch.isin(layer_tokens, ends)
        reached = (layer_values.masked_fill(closed, -torch.inf)[..., None] + best.values).flatten(1)
        tokens, values = [*tokens, best.indices.flatten(1)], [*values, reached]
        parents.append(layer_nodes.repeat_interleave(top_k, -1))
        frontier = reached.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        first = sum(each.shape[1] for each in values[:-1])
        layer_nodes, places = frontier + first, frontier // top_k
        layer_values, layer_tokens = reached.gather(1, frontier), tokens[-1].gather(1, frontier)
    return _likeliest(shape.total_nodes, torch.cat(tokens, 1), torch.cat(values, 1), torch.cat(parents, 1))


def _likeliest(total: int, tokens: Tensor, values: Tensor, parents: Tensor) -> Draft:
    """The tree of the `total` nodes of greatest value in each row."""
    if bool(values.isnan().any()):
        raise DrafterError("the drafter's log-probabilities contain NaN")
    kept = values.sort(dim=-1, descending=True, stable=True).indices[:, :total]
    ranks = torch.full_like(tokens, -1).scatter(
        1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    )
    above = parents.gather(1, kept)
    lengths = (values.gather(1, kept) > -torch.inf).sum(-1).cpu()
    width = int(lengths.max())
    if width == 0:
        return Draft.empty(len(tokens))
    above = torch.where(above >= 0, ranks.gather(1, above.clamp(min=0)), -1)[:, :width].cpu()
    valid = torch.arange(width) < lengths[:, None]
    return Draft(tokens.gather(1, kept)[:, :width].cpu(), lengths, parents=torch.where(valid, above, -1), source="tree")


def ancestors(parents: Tensor) -> Tensor:
    """`(batch, width, width)`, True where a node of `parents` (`(batch, width)`, -1 at the root) sees a column: itself and
    the nodes that it stands on."""
    sees, above = torch.eye(parents.shape[1], dtype=torch.bool).repeat(len(parents), 1, 1), parents
    while bool((above >= 0).any()):
        on_path = torch.nn.functional.one_hot(above.clamp(min=0), parents.shape[1]).bool()
        sees |= on_path & (above >= 0)[..., None]
        above = torch.where(above >= 0, parents.gather(1, above.clamp(min=0)), -1)
    return sees


def children_of(draft: Draft, row: int) -> Mapping[tuple[int, int], int]:
    """The node of each `(parent, token)` of one row's tree; of equal siblings the first."""
    assert draft.parents is not None
    number = int(draft.lengths[row])
    keys = zip(draft.parents[row, :number].tolist(), draft.tokens[row, :number].tolist(), strict=True)
    return {key: node for node, key in reversed([*enumerate(keys)])}
