"""Hybrid drafts: per row the n-gram match, else the model's draft."""

import pytest
import torch

from hf_specdec.drafters import (
    DRAFTERS,
    AssistantDrafter,
    DrafterBase,
    DraftSettings,
    HybridDrafter,
    PromptLookupDrafter,
)
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.verify import RandomStreams
from tests.toys import tiny_llama


VOCAB_SIZE = 8


class Fixed(DrafterBase):
    """Proposes one recorded draft and remembers what it was asked."""

    def __init__(self, draft):
        super().__init__(DraftSettings(vocab_size=VOCAB_SIZE))
        self.draft, self.asked = draft, []

    def propose(self, context, budget):
        self.asked.append(budget)
        return self.draft

    def match(self, context, max_tokens):
        return self.propose(context, Budget(max_tokens))


def ngram_draft(*rows):
    width = max(map(len, rows), default=0)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
    return Draft(tokens.view(len(rows), width), torch.tensor(list(map(len, rows))), source="ngram" if width else "none")


def model_draft(*rows, sampled=True, keep_logits=True):
    draft = ngram_draft(*rows)
    logits = torch.randn(*draft.tokens.shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    q = (logits / 2).softmax(-1)
    return Draft(
        draft.tokens, draft.lengths, q=q if sampled else None, logits=logits if keep_logits else None, source="model"
    )


def merged(ngram, model, max_tokens, unfinished=None, min_confidence=0.0):
    drafters = Fixed(ngram), Fixed(model)
    rows = len(max_tokens)
    alive = torch.ones(rows, dtype=torch.bool) if unfinished is None else torch.tensor(unfinished)
    context = Context(torch.zeros(rows, 3, dtype=torch.long), torch.full((rows,), 3), None, alive)
    budget = Budget(torch.tensor(max_tokens), min_confidence)
    draft = HybridDrafter(DraftSettings(vocab_size=VOCAB_SIZE), *drafters).propose(context, budget)
    return draft.check(context, budget, VOCAB_SIZE), *drafters


def test_the_table_names_it():
    assert DRAFTERS["hybrid"] is HybridDrafter


@pytest.mark.parametrize("model_rows", [([], [1], []), ([], [1, 2, 3, 4], [])])
def test_each_row_takes_its_match_or_else_the_models_draft(model_rows):
    """The two drafts may be of any widths."""
    model = model_draft(*model_rows)
    draft, _, asked = merged(ngram_draft([3, 4, 5], [], [6]), model, [4, 4, 4])
    assert [draft.tokens[row, :length].tolist() for row, length in enumerate(draft.lengths)] == [
        [3, 4, 5],
        model_rows[1],
        [6],
    ]
    assert draft.source == "hybrid"
    assert asked.asked[0].max_tokens.tolist() == [0, 4, 0]

    width = len(model_rows[1])
    assert torch.equal(draft.q[1, :width], model.q[1])
    assert torch.equal(draft.logits[1, :width], model.logits[1])
    for row, tokens in ((0, [3, 4, 5]), (2, [6])):
        certain = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float()
        assert torch.equal(draft.q[row, : len(tokens)], certain)
        assert torch.equal(draft.logits[row, : len(tokens)].softmax(-1), certain)


def test_laws_that_the_model_does_not_carry_are_not_invented():
    draft, *_ = merged(ngram_draft([3], []), model_draft([], [1], sampled=False, keep_logits=False), [2, 2])
    assert draft.q is None
    assert draft.logits is None
    assert draft.lengths.tolist() == [1, 1]


def test_a_model_that_drafts_nothing_leaves_the_matches():
    draft, *_ = merged(ngram_draft([3, 4], []), Draft.empty(2), [2, 2])
    assert draft.lengths.tolist() == [2, 0]
    assert draft.tokens[0].tolist() == [3, 4]
    assert draft.q is None


def test_without_any_match_the_models_draft_passes_through():
    model = model_draft([1, 2], [3])
    draft, *_ = merged(ngram_draft([], []), model, [2, 2])
    assert draft is model


@pytest.mark.parametrize(("unfinished", "max_tokens"), [([True, True], [2, 2]), ([True, False], [2, 2])])
def test_the_model_is_not_asked_when_every_living_row_has_a_match(unfinished, max_tokens):
    ngram = ngram_draft([3], [4] if unfinished[1] else [])
    draft, _, model = merged(ngram, model_draft([1], [1]), max_tokens, unfinished)
    assert draft is ngram
    assert model.asked == []


def test_the_model_is_not_asked_for_rows_without_a_budget():
    ngram = ngram_draft([3], [])
    draft, _, model = merged(ngram, model_draft([1], [1]), [2, 0])
    assert draft is ngram
    assert model.asked == []


def test_the_confidence_bound_reaches_the_model():
    *_, model = merged(ngram_draft([3], []), model_draft([], [1]), [2, 2], min_confidence=0.3)
    assert model.asked[0].min_confidence == 0.3


@pytest.mark.parametrize("do_sample", [False, True])
def test_each_row_proposes_what_its_drafter_proposes_alone(do_sample):
    """With the real parts, over several rounds of growing texts: rows change sides, and the model keeps up."""
    model = tiny_llama(vocab_size=VOCAB_SIZE, layers=1)

    def parts():
        torch.manual_seed(7)
        streams = RandomStreams(4)
        streams.uniforms(torch.zeros(4, dtype=torch.bool))  # seeds them now
        settings = DraftSettings(VOCAB_SIZE, do_sample=do_sample, streams=streams, keep_logits=True)
        return settings, PromptLookupDrafter(settings, 3, 3), AssistantDrafter(settings, model)

    texts = torch.randint(0, 3, (4, 9))
    hybrid, sources = HybridDrafter(*parts()), []
    _, ngram, alone = parts()
    for _ in range(6):
        context, budget = Context.of(texts), Budget(torch.full((4,), 3))
        matched = ngram.propose(context, budget)
        left = Budget(torch.where(matched.lengths > 0, 0, budget.max_tokens))
        modelled = alone.propose(context, left)
        draft = hybrid.propose(context, budget).check(context, budget, VOCAB_SIZE)
        for row in range(4):
            source = matched if matched.lengths[row] else modelled
            length = int(draft.lengths[row])
            assert length == int(source.lengths[row])
            assert draft.tokens[row, :length].tolist() == source.tokens[row, :length].tolist()
            if source is modelled:
                assert torch.equal(draft.logits[row, :length], source.logits[row, :length])
                assert not do_sample or torch.equal(draft.q[row, :length], source.q[row, :length])
        sources.append(tuple((matched.lengths > 0).tolist()))
        texts = torch.cat([texts, torch.randint(0, 3, (4, 1))], 1)
    assert any(0 < sum(round_) < 4 for round_ in sources)
    assert len(set(sources)) > 1
