"""A prefix LM that can be asked for the logits of all nodes of a tree at once, and keep one of its paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from hf_specdec._compat import TREE_CLASSES, undecorated_model
from hf_specdec.cache_rows import can_realign
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Draft
from hf_specdec.trees import ancestors


__all__ = ["TreeLM", "check_tree_attention", "check_tree_target"]

_ATTENTIONS = ("eager", "sdpa")


def check_tree_target(model: Any, cache: Any) -> None:
    """Raises an [`UnsupportedModelError`] that names the model if it cannot be shown a tree."""
    inner = undecorated_model(model)
    name = type(inner).__name__
    if name not in TREE_CLASSES:
        raise UnsupportedModelError(
            f"{name} is not known to take the attention mask of a tree. Draft a chain with tree=None; trees are known to work "
            f"with {', '.join(sorted(TREE_CLASSES))}."
        )
    check_tree_attention(inner)
    if type(cache) is not DynamicCache or cache.offloading or not can_realign(cache):
        kind = f"{type(cache).__name__}{' with offloading' if getattr(cache, 'offloading', False) else ''}"
        raise UnsupportedModelError(
            f"of a tree one path must be kept in the cache, which {kind} of {name} cannot do: drop `cache_implementation`, or "
            "draft a chain with tree=None"
        )


def check_tree_attention(model: Any) -> None:
    """Raises an [`UnsupportedModelError`] that names the model, a target or a drafter network, if its attention takes masks of
    its own kind only."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in _ATTENTIONS:
        raise UnsupportedModelError(
            f"a tree needs an attention that takes any mask, {' or '.join(_ATTENTIONS)}, and {type(model).__name__} was loaded "
            f'with {attention}: load it with attn_implementation="sdpa", or draft a chain with tree=None'
        )


@dataclass(frozen=True)
class _Nodes:
    """What the final columns of a pass may see.

    Args:
        columns (`torch.LongTensor` of shape `(batch, fed)`): The column that each would have in a chain.
        sees (`torch.BoolTensor` of shape `(batch, fed, seen)`): Whether each sees the final `seen` columns of the pass, the
            fed ones included; it sees all that stand before them.
        seen_columns (`torch.LongTensor` of shape `(batch, seen)`): The columns that those would have.
    """

    columns: Tensor
    sees: Tensor
    seen_columns: Tensor


@final
class TreeLM(PrefixLM):
    """Logits of prefixes, and of the nodes of a tree after them.

    A node stands at the position after its parent's and sees its ancestors only. Sliding windows count positions, so that
    each node sees what it would see in a chain.

    Args:
        model (`PreTrainedModel`): As for [`PrefixLM`].
        forward (`Callable`, *optional*): As for [`PrefixLM`].
        moved (`Callable`, *optional*): Told `(source, target)` columns, both `(batch, depth)` with -1 for none, when accepted
            nodes move to the columns that they have in a chain.
        options: Further options of [`PrefixLM`].
    """

    def __init__(
        self,
        model: Any,
        *,
        forward: Callable[..., Any] | None = None,
        moved: Callable[[Tensor, Tensor], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, forward=self._with_tree_mask, **options)
        self._passes_on = model if forward is None else forward
        self._moved = moved
        self._nodes: _Nodes | None = None  # of the pass under way
        self._grown: _Nodes | None = None  # of the latest layer of growing trees
        self._first_node = torch.zeros(0, dtype=torch.long)
        self._width = 0

    def run_tree(self, tokens: Tensor, lengths: Tensor, tree: Draft) -> Any:
        """Runs the model over what its cache lacks of the prefixes and over all nodes of the trees after them.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, columns)`): Prefixes, on the CPU; row `b` ends at `lengths[b]`.
            lengths (`torch.LongTensor` of shape `(batch,)`): Their lengths.
            tree ([`Draft`]): The trees, with `parents`.

        Returns:
            The model's output. Its `logits` have the shape `(batch, 1 + nodes, vocab)`: those after the prefix come first.
        """
        assert tree.parents is not None
        kept = torch.minimum(self._common_prefix(tokens, lengths), lengths - 1)
        self._keep(kept)
        pending = lengths - kept
        width = int((pending + tree.lengths).max())
        slots = torch.arange(width)
        columns, nodes = kept[:, None] + slots, slots - pending[:, None]
        is_node, nodes = (nodes >= 0) & (nodes < tree.lengths[:, None]), nodes.clamp(0, tree.width - 1)
        padded = torch.nn.functional.pad(tokens, (0, max(0, int(columns.max()) + 1 - tokens.shape[1])))
        text = padded.gather(1, columns).masked_fill(columns >= lengths[:, None], self.pad_token_id)
        ids = torch.where(is_node, tree.tokens.gather(1, nodes), text)
        places = torch.where(
            is_node, lengths[:, None] - 1 + tree.depths.gather(1, nodes), columns.minimum(lengths[:, None] - 1)
        )
        is_filler = (columns >= lengths[:, None]) & ~is_node
        self.fed_columns = columns.masked_fill(is_filler, -1)
        sees = _sees(pending, is_node, nodes, tree.parents)
        first = int(pending.min()) - 1
        outputs = self._run_nodes(_Nodes(places, sees, places), ids, kept, width - first)
        self._remember(padded, columns, ids, lengths, kept + width)
        self._first_node, self._width = pending, width
        wanted = pending[:, None] - 1 - first + torch.arange(1 + tree.width)
        wanted = (wanted + outputs.logits.shape[1] - (width - first)).clamp(max=outputs.logits.shape[1] - 1)
        wanted = wanted.to(outputs.logits.device)[..., None].expand(-1, -1, outputs.logits.shape[-1])
        outputs["logits"] = outputs.logits.gather(1, wanted)
        return outputs

    def keep_path(self, path: Tensor) -> None:
        """Moves the nodes of a path to the front, so that the cache holds each row's prefix with its path as a chain.

        Args:
            path (`torch.LongTensor` of shape `(batch, depth)`): Nodes of the tree that [`~TreeLM.run_tree`] ran, from the root
                on; -1 after the last.
        """
        rows, depth = path.shape
        chosen, steps = path >= 0, torch.arange(depth).expand(rows, -1)
        start = self._num_known[:, None]
        source, target = start + path, (start + steps).masked_fill(~chosen, -1)
        source = source.masked_fill(~chosen, -1)
        if bool((path != steps)[chosen].any()):
            places = torch.arange(self._width).expand(rows, -1).clone()
            front = self._first_node[:, None]
            row, step = chosen.nonzero(as_tuple=True)
            places[row, (front + steps)[row, step]] = (front + path)[row, step]
            for layer in self._cache.layers:
                if getattr(layer, "keys", None) is not None and layer.keys.numel() > 0:
                    _permute_last(layer.keys, places)
                    _permute_last(layer.values, places)
            held = self._held.clone()
            held[row, target[row, step]] = self._held[row, source[row, step]]
            self._held = held
            if self._moved is not None:
                self._moved(source, target)
        self._num_known = self._num_known + chosen.sum(-1)

    def expand(self, tokens: Tensor, places: Tensor, layer: int) -> Tensor:
        """Runs the model over a layer of growing trees: `(batch, nodes, vocab)`, the logits after each node.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, nodes)`): The layer's tokens.
            places (`torch.LongTensor` of shape `(batch, nodes)`): Places of their parents in the layer fed before.
            layer (`int`): 1 for the first layer, which stands on the known prefixes.
        """
        width, own = tokens.shape[1], torch.eye(tokens.shape[1], dtype=torch.bool).expand(len(tokens), -1, -1)
        columns = (self._num_known[:, None] + layer - 1).expand(-1, width)
        if layer == 1 or self._grown is None:
            if bool((self._num_known < self._num_held).any()):
                self._keep(self._num_known)
            self._grown = _Nodes(columns, own, columns)
        else:
            above = self._grown.sees.gather(1, places.cpu()[..., None].expand(-1, -1, self._grown.sees.shape[-1]))
            seen = torch.cat([self._grown.seen_columns, columns], 1)
            self._grown = _Nodes(columns, torch.cat([above, own], -1), seen)
        held = self._num_held.clone()
        self.fed_columns = torch.full_like(columns, -1)
        outputs = self._run_nodes(self._grown, tokens.cpu(), held, width)
        self._num_held = held + width
        room = int(self._num_held.max()) - self._held.shape[1]
        self._held = torch.nn.functional.pad(self._held, (0, max(0, room)), value=-1)
        return outputs.logits[:, -width:]

    def _run_nodes(self, nodes: _Nodes, ids: Tensor, held: Tensor, logits_to_keep: int) -> Any:
        self._nodes = nodes
        try:
            return self._forward(ids, nodes.columns, held, logits_to_keep)
        finally:
            self._nodes = None

    def _with_tree_mask(self, **inputs: Any) -> Any:
        """The forward call, with the mask of a tree in place of the padding's where one is run."""
        if self._nodes is not None:
            inputs["attention_mask"] = self._tree_mask(self._nodes, inputs.get("attention_mask"))
        return self._passes_on(**inputs)

    def _tree_mask(self, nodes: _Nodes, padding: Tensor | None) -> Any:
        """One additive mask, or one for each kind of layer where they differ."""
        rows, width, num_seen = nodes.sees.shape
        total = self.hidden_columns + int(self._num_held.max()) + width
        before = total - num_seen
        visible = torch.ones(rows, total, dtype=torch.bool) if padding is None else padding.cpu().bool()
        # Every column sees itself: a column that saw nothing would be NaN.
        itself = torch.nn.functional.pad(torch.eye(width, dtype=torch.bool), (num_seen - width, 0))
        sees = (nodes.sees & visible[:, None, before:]) | itself
        sees = torch.cat([visible[:, None, :before].expand(-1, width, -1), sees], -1)
        shift = (self._num_held.max() - self._num_held)[:, None]
        seen_columns = torch.cat([torch.arange(before) - self.hidden_columns - shift, nodes.seen_columns], 1)
        distances = nodes.columns[..., None] - seen_columns[:, None]
        masks: dict[int, Tensor] = {}
        kinds: dict[str, Tensor] = {}
        config = undecorated_model(self.model).config.get_text_config(decoder=True)
        names = getattr(config, "layer_types", None) or ["attention"] * len(self._cache.layers)
        for name, layer in zip(names, self._cache.layers, strict=False):
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
            if window not in masks:
                length, offset = layer.get_mask_sizes(width)
                allowed = sees & (distances < window) if window else sees
                masks[window] = self._additive(allowed[..., offset : offset + length])
            kinds[name] = masks[window]
        return next(iter(masks.values())) if len(masks) == 1 else kinds

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype = undecorated_model(self.model).dtype
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
        return mask[:, None].to(self.device)


def _sees(pending: Tensor, is_node: Tensor, nodes: Tensor, parents: Tensor) -> Tensor:
    """`(batch, width, width)`: text sees the text before it, a node all text and its ancestors."""
    width = is_node.shape[1]
    by_node = ancestors(parents)
    by_node = by_node.gather(1, nodes[..., None].expand(-1, -1, by_node.shape[-1]))
    by_node = by_node.gather(2, nodes[:, None].expand(-1, width, -1)) & is_node[:, None]
    text = (torch.arange(width) < pending[:, None])[:, None]
    return torch.where(is_node[..., None], text | by_node, torch.ones(width, width, dtype=torch.bool).tril())


def _permute_last(states: Tensor, places: Tensor) -> None:
    """Rearranges the final columns of cached `states`, in place."""
    last = states[:, :, -places.shape[1] :]
    index = places.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    last.copy_(last.gather(2, index))
