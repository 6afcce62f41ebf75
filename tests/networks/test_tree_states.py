"""Trees of drafter networks against logits computed from scratch, along random walks of accepts, rejects and skipped rounds."""

from functools import cache

import pytest
import torch

from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import DraftSettings, TreeDrafter
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.features import TargetFeatures
from hf_specdec.records import Budget, Context
from hf_specdec.tree_lm import TreeLM
from hf_specdec.trees import TreeShape
from tests.networks import KINDS, drafter_for, reference_logits, small_target
from tests.toys import prompts


SHAPE = TreeShape(depth=3, top_k=2, total_nodes=6)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@cache
def target():
    return small_target()


class Walk:
    """A decoding run in which the paths accepted and the tokens after them are drawn at random."""

    def __init__(self, network, batch_size=1, seed=0):
        self.network = network
        inputs = prompts(batch_size)
        ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.features = TargetFeatures(target(), network.taps_of(target()))
        with self.features.of_prompt(ids.shape[1]):
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            outputs = target()(**inputs, position_ids=positions, use_cache=True)
        self.target = TreeLM(
            target(),
            prompt_mask=self.mask,
            cache=outputs[CACHE_KEY],
            held=ids,
            forward=self.features.around(target()),
            moved=self.features.store.move,
        )
        self.features.follow(self.target)
        self.drafter = TreeDrafter(DraftSettings(64), network, self.features, SHAPE)
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.nn.functional.pad(ids, (0, 200))
        self.lengths = torch.full((batch_size,), ids.shape[1])
        self.watch()
        self.commit([[] for _ in ids])

    def watch(self):
        """Keeps what the network says about each layer, with the tokens and parents that it was asked about."""
        states, self.seen = self.drafter.states, []
        first, expand = states.first_logits, states.expand

        def watched_first(context, open_rows):
            self.first, self.seen = first(context, open_rows), []
            return self.first

        def watched_expand(tokens, places, layer):
            logits = expand(tokens, places, layer)
            self.seen.append((tokens.tolist(), places.tolist(), logits))
            return logits

        states.first_logits, states.expand = watched_first, watched_expand

    def random(self, most):
        return int(torch.randint(most + 1, (), generator=self.generator))

    def draft(self, budget):
        context = Context(self.tokens, self.lengths, self.mask, torch.ones(len(self.lengths), dtype=torch.bool))
        return self.drafter.propose(context, Budget(budget)).check(context, Budget(budget), 64)

    def verify(self, draft):
        """The target's pass over the trees, then a random path of each row and a token of nobody's choice."""
        if draft.parents is None:
            self.target.run(self.tokens, self.lengths, torch.ones_like(self.lengths))
            return self.commit([[] for _ in self.lengths])
        self.target.run_tree(self.tokens, self.lengths, draft)
        path, kept = torch.full((len(self.lengths), SHAPE.depth), -1), []
        for row, length in enumerate(draft.lengths.tolist()):
            nodes, node = [], self.random(length) - 1
            while node >= 0:
                nodes, node = [node, *nodes], int(draft.parents[row, node])
            path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
            kept.append(draft.tokens[row, nodes].tolist())
        self.target.keep_path(path)
        return self.commit(kept)

    def commit(self, kept):
        for row, tokens in enumerate(kept):
            start = int(self.lengths[row])
            new = [*tokens, 1 + self.random(62)]
            self.tokens[row, start : start + len(new)] = torch.tensor(new)
            self.lengths[row] += len(new)

    def text(self, row):
        """The row's real tokens."""
        return self.tokens[row, int((self.mask[row] == 0).sum()) : int(self.lengths[row])].tolist()

    def assert_exact(self, open_rows):
        """Compares the law after every node that was expanded; returns how many."""
        count = 0
        for row in open_rows:
            text, paths = self.text(row), [[]]
            expected = reference_logits(self.network, target(), text)[-1]
            torch.testing.assert_close(self.first[row], expected, rtol=1e-5, atol=1e-5)
            for tokens, places, logits in self.seen:
                paths = [[*paths[place], token] for token, place in zip(tokens[row], places[row], strict=True)]
                for node, path in enumerate(paths):
                    expected = reference_logits(self.network, target(), text, path)[-1]
                    torch.testing.assert_close(logits[row, node], expected, rtol=1e-5, atol=1e-5)
                    count += 1
        return count


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_every_node_equal_a_computation_without_cache(kind, batch_size):
    walk = Walk(drafter_for(target(), kind), batch_size)
    num_compared = 0
    for round_ in range(9):
        most = 0 if round_ in (3, 4) else 3  # whole rounds without drafts, and rows without drafts in others
        # ... and whole trees, in which a node of the second layer has a parent that is not the first
        budget = torch.tensor([most if (round_ + row) % 2 else walk.random(most) for row in range(batch_size)])
        draft = walk.draft(budget)
        if draft.width:
            num_compared += walk.assert_exact(budget.nonzero()[:, 0].tolist())
        walk.verify(draft)
    assert num_compared > 8 * batch_size


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(attention):
    network = drafter_for(target())
    network.set_attn_implementation(attention)
    walk = Walk(network, 4)
    for _ in range(3):
        draft = walk.draft(torch.full((4,), 3))
        assert walk.assert_exact(range(4)) == 4 * 2 * 2
        walk.verify(draft)


def test_a_draft_asked_for_twice_is_the_same():
    walk = Walk(drafter_for(target()), 4)
    walk.verify(walk.draft(torch.full((4,), 3)))
    first, second = (walk.draft(torch.full((4,), 3)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.parents, second.parents)


def test_a_budget_may_ask_for_fewer_nodes():
    walk = Walk(drafter_for(target()))
    context = Context(walk.tokens, walk.lengths, walk.mask, torch.ones(1, dtype=torch.bool))
    whole = walk.drafter.propose(context, Budget(torch.tensor([3])))
    part = walk.drafter.propose(context, Budget(torch.tensor([3]), max_nodes=4))
    assert part.lengths.tolist() == [4]
    assert torch.equal(part.tokens, whole.tokens[:, :4])


def test_stock_assisted_decoding_is_refused():
    walk = Walk(drafter_for(target()))
    with pytest.raises(UnsupportedModelError, match=r"hidden states.*speculative_config"):
        walk.drafter.get_candidates(walk.tokens[:, : int(walk.lengths)])
