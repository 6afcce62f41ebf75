"""The law that a rule emits, by enumeration over everything a drafter may propose. No dice, so no tolerance for luck."""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.records import Evidence, Place, choice_law


__all__ = [
    "WARPERS",
    "Dice",
    "each_token",
    "error",
    "joint_law",
    "members",
    "place_of",
    "random_scores",
    "target_law",
    "warped",
]

WARPERS = {
    "T=1": [],
    "T=.5": [TemperatureLogitsWarper(0.5)],
    "T=2": [TemperatureLogitsWarper(2.0)],
    "T=1e-6": [TemperatureLogitsWarper(1e-6)],
    "top-k": [TopKLogitsWarper(3)],
    "top-p": [TopPLogitsWarper(0.7)],
    "min-p": [MinPLogitsWarper(0.2)],
    "T=.5,top-k": [TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)],
    "T=2,top-p,min-p": [TemperatureLogitsWarper(2.0), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)],
}


class Dice:
    """Streams that give the numbers they were loaded with, `(rows, throws)`."""

    def __init__(self, numbers):
        self.numbers, self.thrown = numbers, 0

    def uniforms(self, rows):
        self.thrown += 1
        return self.numbers[:, self.thrown - 1]


def error(ours, exact):
    """The largest difference."""
    return float((ours - exact).abs().max())


def random_scores(depth, vocab_size, seed, dtype=torch.float64, spread=1.5):
    """Logits of a model that knows nothing but tables: entry `d` has the shape `(vocab,) * d + (vocab,)`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (spread * torch.randn(*[vocab_size] * (d + 1), generator=generator, dtype=torch.float64)).to(dtype)
        for d in range(depth + 1)
    ]


def warped(tables, processors):
    """The tables after some of transformers' warpers."""
    processors = LogitsProcessorList(processors)
    return [processors(None, table.reshape(-1, table.shape[-1]).clone()).view(table.shape) for table in tables]


def target_law(scores, do_sample=True):
    """`(vocab,) * len(scores)`, the law of the next `len(scores)` tokens in plain decoding."""
    law = choice_law(scores[0], do_sample).double()
    for table in scores[1:]:
        law = law[..., None] * choice_law(table, do_sample).double()
    return law


def joint_law(rule, scores, laws=None, *, do_sample=True, path=None, raw=None, draft_logits=None, prompt=(0,)):
    """The law of the next `width + 1` tokens when a draft of `width` tokens is judged by `rule`.

    A round that emits fewer tokens is continued with the target's own law.

    Args:
        rule: The rule; its `acceptance` and `replacement` are all that is used.
        scores: The target's processed scores, `width + 1` tables.
        laws: The draft's laws, `width` tables; None for the point masses at `path`.
        do_sample: Whether the target samples.
        path: The drafted tokens, where they are point masses.
        raw, draft_logits: Tables of untempered logits, for rules that look at them.
        prompt: The tokens before the drafts, for rules that look at the prefix.
    """
    width, vocab_size = len(scores) - 1, scores[0].shape[-1]
    if laws is None:
        paths = torch.tensor([path])
        weights = torch.ones(1, dtype=torch.float64)
    else:
        paths = torch.cartesian_prod(*[torch.arange(vocab_size)] * width).view(-1, width)
        drawn = _along(laws, paths).gather(-1, paths[..., None])[..., 0].double().prod(-1)
        paths, weights = paths[drawn > 0], drawn[drawn > 0]
    evidence = Evidence(
        tokens=paths,
        valid=torch.ones_like(paths, dtype=torch.bool),
        scores=_along(scores[:-1], paths),
        target_logits=_along(scores[:-1] if raw is None else raw[:width], paths),
        do_sample=do_sample,
        q=None if laws is None else _along(laws, paths),
        draft_logits=None if draft_logits is None else _along(draft_logits[:width], paths),
        place=place_of(paths, prompt),
    )
    acceptance = rule.acceptance(evidence).double()
    assert bool(((acceptance >= 0) & (acceptance <= 1)).all())
    plain = [choice_law(table, do_sample).double() for table in scores]
    joint, reached = torch.zeros(*[vocab_size] * (width + 1), dtype=torch.float64), weights
    for position in range(width + 1):
        if position < width:
            ended = evidence.at(torch.full((len(paths),), position))
            ends, law = reached * (1 - acceptance[:, position]), rule.replacement(ended).double()
            reached = reached * acceptance[:, position]
        else:
            ends, law = reached, _at(plain[width], paths)
        emitted = torch.zeros(*[vocab_size] * (position + 1), dtype=torch.float64)
        if position:
            emitted.index_put_(tuple(paths[:, :position].T), ends[:, None] * law, accumulate=True)
        else:
            emitted += (ends[:, None] * law).sum(0)
        for table in plain[position + 1 :]:
            emitted = emitted[..., None] * table
        joint += emitted
    return joint


def place_of(paths, prompt=(0,)):
    """Where drafts stand that follow the prompt at once."""
    before = torch.tensor([list(prompt)]).expand(len(paths), -1)
    columns = (len(prompt) + torch.arange(paths.shape[1])).expand(len(paths), -1)
    return Place(torch.cat([before, paths], 1), columns, len(prompt))


def each_token(logits, draft=None, scores=None):
    """One row per token of the vocabulary, greedy."""
    logits = torch.as_tensor(logits, dtype=torch.float64)
    vocab_size = len(logits)
    tokens = torch.arange(vocab_size)[:, None]

    def rows(values):
        return None if values is None else torch.as_tensor(values, dtype=torch.float64).expand(vocab_size, 1, -1)

    scores = rows(logits if scores is None else scores)
    valid = torch.ones_like(tokens) > 0
    return Evidence(tokens, valid, scores, rows(logits), False, draft_logits=rows(draft), place=place_of(tokens))


def members(rule, *args, **options):
    """The tokens that a rule lets in, of a vocabulary given as to [`each_token`]."""
    return rule.members(each_token(*args, **options))[:, 0].nonzero()[:, 0].tolist()


def _at(table, prefixes):
    """The row of a table that follows each of the prefixes, `(number, vocab)`."""
    depth = table.ndim - 1
    return table[tuple(prefixes[:, :depth].T)] if depth else table.expand(len(prefixes), -1)


def _along(tables, paths):
    return torch.stack([_at(table, paths) for table in tables], 1)
