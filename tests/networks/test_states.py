"""Drafter networks against logits computed from scratch, along random walks of accepts, rejects and skipped rounds.

Verification would hide a drafter that reads wrong features or keeps a wrong cache: the text stays right and nobody notices.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import DraftSettings, HeadDrafter
from hf_specdec.errors import DrafterError, UnsupportedModelError
from hf_specdec.features import TargetFeatures
from hf_specdec.networks import Eagle3Drafter
from hf_specdec.prefix_lm import PrefixLM
from hf_specdec.records import Budget, Context
from hf_specdec.verify import RandomStreams
from tests.networks import KINDS, draft_logits, drafter_for, reference_logits, small_target
from tests.toys import prompts


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@cache
def target():
    return small_target()


class Walk:
    """A decoding run in which the number of accepted drafts and the tokens after them are drawn at random."""

    def __init__(self, network, batch_size=1, seed=0, do_sample=True):
        self.network = network
        inputs = prompts(batch_size)
        ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.features = TargetFeatures(target(), network.taps_of(target()))
        with self.features.of_prompt(ids.shape[1]):
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            outputs = target()(**inputs, position_ids=positions, use_cache=True)
        self.target = PrefixLM(
            target(),
            prompt_mask=self.mask,
            cache=outputs[CACHE_KEY],
            held=ids,
            forward=self.features.around(target()),
        )
        self.features.follow(self.target)
        settings = DraftSettings(64, do_sample=do_sample, streams=RandomStreams(batch_size), keep_logits=True)
        self.drafter = HeadDrafter(settings, network, self.features)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.nn.functional.pad(ids, (0, 200))
        self.lengths = torch.full((batch_size,), ids.shape[1])
        self.prompt_columns = ids.shape[1]
        self.commit(torch.zeros(batch_size, dtype=torch.long), None)

    def random(self, most):
        return int(torch.randint(most + 1, (), generator=self.generator))

    def draft(self, budget):
        context = Context(self.tokens, self.lengths, self.mask, torch.ones(len(self.lengths), dtype=torch.bool))
        return self.drafter.propose(context, Budget(budget)).check(context, Budget(budget), 64)

    def verify(self, draft):
        """The target's pass over the draft, then some leading drafts of each row and a token of nobody's choice."""
        with_draft = self.tokens.clone()
        for row, length in enumerate(draft.lengths.tolist()):
            start = int(self.lengths[row])
            with_draft[row, start : start + length] = draft.tokens[row, :length]
        self.target.run(with_draft, self.lengths + draft.lengths, draft.lengths + 1)
        self.commit(torch.tensor([self.random(length) for length in draft.lengths.tolist()]), draft)

    def commit(self, num_accepted, draft):
        for row, count in enumerate(num_accepted.tolist()):
            start = int(self.lengths[row])
            if draft is not None:
                self.tokens[row, start : start + count] = draft.tokens[row, :count]
            self.tokens[row, start + count] = 1 + self.random(62)
        self.lengths = self.lengths + num_accepted + 1

    def text(self, row):
        """The row's real tokens."""
        return self.tokens[row, int((self.mask[row] == 0).sum()) : int(self.lengths[row])].tolist()

    def assert_exact(self, draft):
        for row, length in enumerate(draft.lengths.tolist()):
            if length == 0:
                continue
            drafted = draft.tokens[row, :length].tolist()
            expected = reference_logits(self.network, target(), self.text(row), drafted[:-1])
            torch.testing.assert_close(draft_logits(draft, row), expected, rtol=1e-5, atol=1e-5)
            if draft.q is not None:
                torch.testing.assert_close(draft.q[row, :length], expected.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_a_computation_without_cache(kind, batch_size):
    walk = Walk(drafter_for(target(), kind), batch_size)
    num_compared = 0
    for round_ in range(14):
        most = 0 if round_ in (3, 4, 9) else 4  # whole rounds without drafts, and rows without drafts in others
        draft = walk.draft(torch.tensor([walk.random(most) for _ in range(batch_size)]))
        walk.assert_exact(draft)
        num_compared += int(draft.lengths.sum())
        walk.verify(draft)
    assert num_compared > 10 * batch_size


def test_the_toys_drafts_depend_on_everything_that_is_compared():
    """Features, their order and the distant past all move the logits by far more than the tolerance."""
    network = drafter_for(target(), "eagle3")
    text = list(range(3, 15))
    logits = reference_logits(network, target(), text)
    assert (reference_logits(network, target(), [40, *text[1:]]) - logits).abs().max() > 0.01
    network.config.taps = [3, 2, 3]
    assert (reference_logits(network, target(), text) - logits).abs().max() > 0.1


def test_a_draft_asked_for_twice_is_the_same():
    walk = Walk(drafter_for(target()), 4, do_sample=False)
    walk.verify(walk.draft(torch.full((4,), 3)))
    first, second = (walk.draft(torch.full((4,), 4)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    torch.testing.assert_close(first.logits, second.logits)


def test_features_are_forgotten_once_they_were_read():
    walk = Walk(drafter_for(target()))
    for _ in range(6):
        walk.verify(walk.draft(torch.tensor([4])))
    walk.draft(torch.tensor([1]))
    assert walk.features.store.first_column == int(walk.lengths) - 2


def test_a_pass_that_nobody_watched_is_an_error():
    walk = Walk(drafter_for(target()))
    walk.verify(walk.draft(torch.tensor([3])))
    walk.lengths = walk.lengths + 5
    with pytest.raises(DrafterError, match="must see every forward pass"):
        walk.draft(torch.tensor([3]))


def test_stock_assisted_decoding_is_refused():
    walk = Walk(drafter_for(target()))
    with pytest.raises(UnsupportedModelError, match="speculative_config"):
        walk.drafter.get_candidates(walk.tokens[:, : int(walk.lengths)])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(attention):
    network = drafter_for(target())
    network.set_attn_implementation(attention)
    walk = Walk(network, 4)
    for _ in range(4):
        draft = walk.draft(torch.full((4,), 3))
        walk.assert_exact(draft)
        walk.verify(draft)


def test_min_confidence_and_eos_end_a_row():
    walk = Walk(drafter_for(target()), do_sample=False)
    context = Context(walk.tokens, walk.lengths, walk.mask, torch.ones(1, dtype=torch.bool))
    draft = walk.drafter.propose(context, Budget(torch.tensor([4])))
    assert int(draft.lengths) == 4
    assert int(walk.drafter.propose(context, Budget(torch.tensor([4]), 1.01)).lengths) == 0
    walk.drafter.settings = replace(walk.drafter.settings, eos_token_ids=(int(draft.tokens[0, 1]),))
    assert int(walk.drafter.propose(context, Budget(torch.tensor([4]))).lengths) <= 2


def test_the_published_taps():
    network = drafter_for(target())
    assert isinstance(network, Eagle3Drafter)
    assert network.config.taps == [2, 3, 3]  # a new one writes them down
    network.config.taps = None
    assert [network.taps(n) for n in (6, 28, 32)] == [(2, 3, 3), (2, 14, 25), (2, 16, 29)]
