"""Prompt lookup against a search that is written as the sentence that describes it."""

import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.drafters import DRAFTERS, DraftSettings, PromptLookupDrafter
from hf_specdec.records import Budget, Context


def reference(text, largest, smallest, max_tokens, vocab_size, eos):
    """What followed the most recent earlier occurrence of the longest suffix that occurs earlier."""
    for size in range(largest, smallest - 1, -1):
        starts = [i for i in range(len(text) - size) if size < len(text) and text[i : i + size] == text[-size:]]
        if starts:
            drafted = []
            for token in text[starts[-1] + size :][:max_tokens]:
                if not 0 <= token < vocab_size:
                    break
                drafted.append(token)
                if token in eos:
                    break
            return drafted
    return []


def drafted_rows(draft):
    return [draft.tokens[row, :length].tolist() for row, length in enumerate(draft.lengths.tolist())]


def lookup(text, max_tokens=4, largest=3, smallest=1, **settings):
    drafter = PromptLookupDrafter(DraftSettings(**{"vocab_size": 100, **settings}), largest, smallest)
    text = torch.tensor([text], dtype=torch.long)
    return drafted_rows(drafter.propose(Context.of(text), Budget(torch.tensor([max_tokens]))))[0]


def test_the_table_names_it():
    assert DRAFTERS["ngram"] is PromptLookupDrafter


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),  # after the earlier 1 2
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2, 4]),  # the longer suffix wins over the more recent 2
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the more recent of two equals, to the end of the text
        ([5, 5, 5], [5]),  # an occurrence may overlap the suffix
        ([1, 2, 3, 4], []),
        ([], []),
        ([1], []),
        ([1, 1], [1]),
    ],
)
def test_what_followed_the_last_occurrence_of_the_longest_suffix(text, drafted):
    assert lookup(text) == drafted


@pytest.mark.parametrize("eos", [(), (3,), (0, 2)])
@pytest.mark.parametrize(("largest", "smallest"), [(1, 1), (3, 1), (4, 2), (9, 1)])
@pytest.mark.parametrize("alphabet", [2, 3, 6])
def test_ragged_padded_batches_against_the_reference(alphabet, largest, smallest, eos):
    """Left padding, filler after each row's end, finished rows and rows without a budget, all at once."""
    generator = torch.Generator().manual_seed(alphabet + 10 * largest)
    vocab_size = alphabet - 1 if alphabet > 3 else alphabet  # the largest alphabet holds an id that the target lacks
    settings = DraftSettings(vocab_size=vocab_size, eos_token_ids=eos)
    drafter, found = PromptLookupDrafter(settings, largest, smallest), 0

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    for _ in range(15):
        tokens, prompt_columns = numbers(0, alphabet, 5, 14), 6
        mask = (torch.arange(prompt_columns) >= numbers(0, 6, 5, 1)).long()
        context = Context(tokens, numbers(6, 15, 5), mask, numbers(0, 5, 5) > 0)
        budget = Budget(numbers(0, 5, 5))
        expected = []
        for row in range(5):
            padding = int((mask[row] == 0).sum())
            text = tokens[row, padding : int(context.lengths[row])].tolist()
            most = int(budget.max_tokens[row]) if context.unfinished[row] else 0
            expected.append(reference(text, largest, smallest, most, vocab_size, eos) if most else [])
        draft = drafter.propose(context, budget)
        assert drafted_rows(draft) == expected
        assert draft.width == max(map(len, expected))
        assert draft.check(context, budget, vocab_size) is draft
        found += sum(map(len, expected))
    assert found >= 5


def test_padding_is_no_text():
    """Rows that hold the same words match alike, however far they are padded; the pad id itself is an ordinary id."""
    text = [0, 7, 8, 0, 7]
    rows = torch.tensor([[*[0] * padding, *text, *[9] * (4 - padding)] for padding in range(5)])
    mask = (torch.arange(9) >= torch.arange(5)[:, None]).long()
    drafter = PromptLookupDrafter(DraftSettings(vocab_size=10))
    everyone = torch.ones(5, dtype=torch.bool)
    context = Context(rows, torch.arange(5) + 5, mask, everyone)
    draft = drafter.propose(context, Budget(torch.full((5,), 3)))
    assert drafted_rows(draft) == [[8, 0, 7]] * 5
    only_padding = Context(rows, torch.arange(5) + 5, torch.zeros(5, 5).long(), everyone)
    assert drafted_rows(drafter.propose(only_padding, Budget(torch.full((5,), 3))))[0] == []


def test_a_draft_ends_with_the_first_eos():
    assert lookup([1, 2, 3, 4, 5, 1, 2], eos_token_ids=(4,)) == [3, 4]
    assert lookup([1, 2, 3, 4, 5, 1, 2], eos_token_ids=(5, 3)) == [3]


def test_a_draft_ends_before_an_id_that_the_target_has_no_logit_for():
    """Embedding tables may be longer than the logits: image placeholders, padded vocabularies."""
    assert lookup([1, 2, 3, 4, 5, 1, 2], vocab_size=5) == [3, 4]
    assert lookup([1, 2, 3, 4, 5, 1, 2], vocab_size=3) == []


def test_drafts_are_point_masses():
    drafter = PromptLookupDrafter(DraftSettings(vocab_size=10, do_sample=True, keep_logits=True))
    draft = drafter.propose(Context.of(torch.tensor([[1, 2, 1]])), Budget(torch.tensor([2])))
    assert draft.q is None
    assert draft.logits is None
    assert draft.source == "ngram"
    empty = drafter.propose(Context.of(torch.tensor([[1, 2, 3]])), Budget(torch.tensor([2])))
    assert (empty.width, empty.source) == (0, "none")


@pytest.mark.parametrize("sizes", [(3, 0), (1, 2), (0, 0)])
def test_suffixes_have_at_least_one_token(sizes):
    with pytest.raises(InvalidConfigError, match="smallest <= largest"):
        PromptLookupDrafter(DraftSettings(vocab_size=10), *sizes)
