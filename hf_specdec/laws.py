"""Pure probability: functions of laws, without dice and without state.

A law is a tensor whose last dimension sums to one. Nothing here knows about models, batches or drafting.
"""

import math
from typing import Literal

import torch
from torch import Tensor


__all__ = [
    "DivergenceKind",
    "EntropyKind",
    "divergence",
    "entropy",
    "in_nucleus",
    "nucleus",
    "nucleus_floor",
    "one_hot",
    "residual",
    "top_overlap",
    "total_variation",
    "without_token",
]

DivergenceKind = Literal["js", "kl", "tv"]
EntropyKind = Literal["full", "topk", "normalized"]


def one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The point masses at `tokens` (`(...)`), of shape `(..., vocab)`."""
    law = torch.zeros(*tokens.shape, vocab_size, dtype=dtype, device=tokens.device)
    return law.scatter_(-1, tokens[..., None], 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """`(p - q)+`, normalised: the law after an exact rejection (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1).

    Where the positive part has no mass (`p == q` up to rounding) a rejection has probability zero and `p` is returned.
    """
    excess = (p - q).clamp(min=0.0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > torch.finfo(p.dtype).tiny, excess / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def without_token(p: Tensor, tokens: Tensor, kept: float = 0.0) -> Tensor:
    """`p` with the probability of one token scaled by `kept` (0 removes it), normalised again.

    Args:
        p (`torch.FloatTensor` of shape `(..., vocab)`): The law.
        tokens (`torch.LongTensor` of shape `(...)`): The token to suppress in each law.
        kept (`float`): Share of its probability that stays.

    Returns:
        The new law. Where nothing else has any mass the old law is returned.
    """
    suppressed = p.scatter(-1, tokens[..., None], p.gather(-1, tokens[..., None]) * kept)
    mass = suppressed.sum(-1, keepdim=True)
    return torch.where(mass > 0, suppressed / mass.where(mass > 0, 1.0), p)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """`sum |p - q| / 2` over the vocabulary; the probability that an exact rule rejects."""
    return 0.5 * (p - q).abs().sum(-1)


def entropy(logits: Tensor, kind: EntropyKind = "full", top_k: int = 3, base: float = math.e) -> Tensor:
    """Shannon entropy of `softmax(logits)`; the kind is explicit because published rules do not agree on one.

    Args:
        logits (`torch.FloatTensor` of shape `(..., vocab)`): Logits, `-inf` allowed.
        kind (`str`): `"full"` sums over the vocabulary; `"topk"` sums the `top_k` largest probabilities only, without
            normalising them; `"normalized"` is the full entropy divided by the logarithm of the vocabulary size.
        top_k (`int`): Terms of the `"topk"` kind.
        base (`float`): Base of the logarithm: e for nats, 2 for bits.

    Returns:
        Entropies of shape `(...)`.
    """
    law = logits.softmax(-1)
    terms = torch.special.entr(law if kind != "topk" else law.topk(min(top_k, law.shape[-1]), -1).values).sum(-1)
    if kind == "normalized":
        return terms / math.log(logits.shape[-1])
    return terms / math.log(base)


def top_overlap(first: Tensor, second: Tensor, top_n: int) -> Tensor:
    """Share of the `top_n` most probable tokens that two logit tensors `(..., vocab)` have in common, in [0, 1]."""
    top_n = min(top_n, first.shape[-1])
    left, right = first.topk(top_n, -1).indices, second.topk(top_n, -1).indices
    return (left[..., :, None] == right[..., None, :]).any(-1).float().mean(-1)


def divergence(p: Tensor, q: Tensor, kind: DivergenceKind = "js") -> Tensor:
    """How far two laws `(..., vocab)` are apart, in nats: Jensen-Shannon, `KL(p || q)` (inf where `q` lacks a token of `p`),
    or the total variation."""
    if kind == "tv":
        return total_variation(p, q)
    if kind == "kl":
        return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).clamp(min=0.0)
    mean = 0.5 * (p + q)
    entropies = [torch.special.entr(law).sum(-1) for law in (mean, p, q)]
    return (entropies[0] - 0.5 * (entropies[1] + entropies[2])).clamp(min=0.0)


def in_nucleus(law: Tensor, tokens: Tensor, mass: float) -> Tensor:
    """Whether each token lies in the smallest set of most probable tokens that holds `mass`, without sorting.

    A token does iff the tokens strictly more probable than it hold less than `mass`; ties are in or out together.

    Args:
        law (`torch.FloatTensor` of shape `(..., vocab)`): The laws.
        tokens (`torch.LongTensor` of shape `(...)`): One token of each law.
        mass (`float`): 0 leaves the nucleus empty, 1 makes it the whole vocabulary.
    """
    above = law.where(law > law.gather(-1, tokens[..., None]), 0.0).sum(-1)
    return (above < mass) | torch.full_like(tokens, mass >= 1.0, dtype=torch.bool)


def nucleus(law: Tensor, mass: float) -> Tensor:
    """The tokens of [`in_nucleus`] as a mask of the law's shape; sorts."""
    if mass <= 0.0:
        return torch.zeros_like(law, dtype=torch.bool)
    if mass >= 1.0:
        return torch.ones_like(law, dtype=torch.bool)
    return law >= nucleus_floor(law.sort(-1, descending=True).values, mass)


def nucleus_floor(ordered: Tensor, mass: float) -> Tensor:
    """`(..., 1)`, the least probability in the nucleus of laws that are sorted, the largest first; `mass` above 0."""
    inside = ordered.cumsum(-1) - ordered < mass
    return ordered.where(inside, 1.0).amin(-1, keepdim=True)
