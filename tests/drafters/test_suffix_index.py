"""The index behind prompt lookup: what a search of the whole text finds, at a cost that does not grow with the text."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.drafters import DraftSettings, PromptLookupDrafter
from hf_specdec.drafters.suffix_index import SuffixIndex
from hf_specdec.records import Budget, Context
from tests.drafters.test_prompt_lookup import drafted_rows, reference


def brute_force(text, largest, smallest):
    """The size of the suffix and the place after its last occurrence, found by comparing every window with it."""
    for size in range(min(largest, len(text) - 1), smallest - 1, -1):
        hits = (text[:-1].unfold(0, size, 1) == text[-size:]).all(-1).nonzero()[:, 0]
        if hits.numel():
            return size, int(hits[-1]) + size
    return None


@pytest.mark.parametrize("sizes", [(3, 1), (1, 1), (4, 2), (9, 3)])
@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_texts_that_grow_shrink_and_change_match_as_in_a_full_search(alphabet, sizes):
    """Extensions by several tokens, the same text again, cuts, changes in the middle, and unrelated texts in turn."""
    generator = torch.Generator().manual_seed(alphabet)
    index, found = SuffixIndex(*sizes), 0

    def number(high):
        return int(torch.randint(high, (1,), generator=generator))

    text = torch.randint(alphabet, (5,), generator=generator)
    for step in range(150):
        kind = number(10)
        if kind < 3:  # a stretch of itself
            start = number(len(text) + 1)
            text = torch.cat([text, text[start : start + number(6)]])
        elif kind < 6:
            text = torch.cat([text, torch.randint(alphabet, (number(6),), generator=generator)])
        elif kind == 6:
            text = text[: number(len(text) + 1)].clone()
        elif kind == 7 and len(text):
            text = text.clone()
            text[number(len(text))] = number(alphabet)
        elif kind == 8 and step % 5 == 0:
            text = torch.randint(alphabet, (number(300),), generator=generator)
        index.follow(text)
        assert index.match() == brute_force(text, *sizes)
        assert index.tokens(0, len(text)) == text.tolist()
        found += index.match() is not None
    assert found > 5


def test_a_text_that_is_cut_is_forgotten():
    """Every entry of what was taken away is gone or what it was before, so nothing grows by going to and fro."""
    index = SuffixIndex(3, 1)
    index.follow(torch.tensor([1, 2, 3, 1, 2]))
    before = dict(index._ends), len(index._replaced)
    for _ in range(3):
        index.follow(torch.tensor([1, 2, 3, 1, 2, 4, 1, 2, 9]))
        assert index.match() is None
        index.follow(torch.tensor([1, 2, 3, 1, 2]))
        assert (dict(index._ends), len(index._replaced)) == before


def test_a_drafter_follows_ragged_rows_over_many_rounds():
    """One drafter throughout: rows grow by different amounts, finish, and are skipped for some rounds."""
    generator = torch.Generator().manual_seed(0)
    padding, texts = [0, 3, 1], [[1, 2, 3, 1, 2, 3, 4], [5, 1, 5, 2], [2, 2, 7, 7, 2, 2]]
    columns = max(pad + len(text) for pad, text in zip(padding, texts, strict=True))
    texts = [[3] * (columns - len(text) - pad) + text for pad, text in zip(padding, texts, strict=True)]
    mask = torch.stack([(torch.arange(columns) >= pad).long() for pad in padding])
    drafter = PromptLookupDrafter(DraftSettings(vocab_size=8, eos_token_ids=(6,)))
    unfinished, drafted = torch.ones(3, dtype=torch.bool), 0
    for round_ in range(60):
        if round_ == 40:
            unfinished[1] = False
        budget = Budget(torch.randint(0, 5, (3,), generator=generator))
        rows = [[0] * pad + text for pad, text in zip(padding, texts, strict=True)]
        width = max(map(len, rows)) + 2
        tokens = torch.tensor([row + [9] * (width - len(row)) for row in rows])
        draft = drafter.propose(Context(tokens, torch.tensor(list(map(len, rows))), mask, unfinished), budget)
        expected = [
            reference(text, 3, 1, int(budget.max_tokens[row]), 8, (6,))
            if unfinished[row] and budget.max_tokens[row] > 0
            else []
            for row, text in enumerate(texts)
        ]
        assert drafted_rows(draft) == expected
        drafted += sum(map(len, expected))
        for row in range(3):
            new = torch.randint(0, 8, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator)
            texts[row] += new.tolist() if unfinished[row] else []
    assert drafted > 100


class _Written(TorchDispatchMode):
    """Counts the elements that operations write: what a search of the text would need one of for each token."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.num_elements += result.numel()
        return result


def round_costs(length):
    """Lines executed and elements written by one round that follows a text of `length` tokens and three new ones."""
    text = torch.arange(length + 3) % 50 + (torch.arange(length + 3) % 7) * 50
    drafter = PromptLookupDrafter(DraftSettings(vocab_size=400))
    drafter.propose(Context.of(text[None, :length]), Budget(torch.tensor([4])))
    context, lines, written = Context.of(text[None]), [0], _Written()

    def trace(frame, event, argument):
        lines[0] += event == "line"
        return trace if "hf_specdec" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with written:
            draft = drafter.propose(context, Budget(torch.tensor([4])))
    finally:
        sys.settrace(before)
    assert int(draft.lengths[0]) == 4
    return lines[0], written.num_elements


def test_a_round_in_a_long_text_costs_what_it_costs_in_a_short_one():
    assert round_costs(50_000) == round_costs(500)
    assert round_costs(500)[0] > 20
