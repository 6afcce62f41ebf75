"""Trees: the dynamic one against brute force, and what its nodes see."""

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec import DrafterError, InvalidConfigError
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.sequences import Sequences
from hf_specdec.tree_walk import TreeWalk
from hf_specdec.trees import TreeShape, ancestors, children_of, grow_tree


VOCAB = 4


def law(*key, sharpness=1.5, vocab=VOCAB):
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.softmax(sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)


def paths_of(draft, row=0):
    paths = []
    for node in range(int(draft.lengths[row])):
        parent, token = int(draft.parents[row, node]), int(draft.tokens[row, node])
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def tree(tokens, parents):
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parents=torch.tensor([parents]))


class Grower:
    """Follows the layers of a growing tree, so that the law of each node can hang on its whole path."""

    def __init__(self, keys, law_of=lambda *key: law(*key).log()):
        self.keys, self.law_of = keys, law_of
        self.layers = [[[()] for _ in keys]]

    def first(self):
        return torch.stack([self.law_of(key) for key in self.keys])

    def expand(self, tokens, places):
        layer = [
            [(*above[int(place)], int(token)) for token, place in zip(tokens[row], places[row], strict=True)]
            for row, above in enumerate(self.layers[-1])
        ]
        self.layers.append(layer)
        laws = [[self.law_of(key, *path) for path in paths] for key, paths in zip(self.keys, layer, strict=True)]
        return torch.stack([torch.stack(each) for each in laws])

    def grow(self, shape, room=None, end_tokens=()):
        room = torch.full((len(self.keys),), shape.depth) if room is None else room
        return grow_tree(shape, self.first(), self.expand, room, end_tokens)


def value(path, key=7):
    return sum(float(law(key, *path[:i]).log()[token]) for i, token in enumerate(path))


def brute_force(shape, key):
    """EAGLE-2's tree, path by path."""
    frontier, nodes = [()], []
    for _ in range(shape.depth):
        layer = [(*path, int(token)) for path in frontier for token in law(key, *path).topk(shape.top_k).indices]
        nodes += layer
        frontier = sorted(layer, key=lambda path: -value(path, key))[: shape.top_k]
    return sorted(nodes, key=lambda path: -value(path, key))[: shape.total_nodes]


@pytest.mark.parametrize("shape", [(3, 2, 6), (4, 3, 20), (2, 4, 20), (5, 1, 5)])
def test_rows_grow_as_if_alone_and_keep_their_likeliest_nodes(shape):
    shape, keys = TreeShape(*shape), [7, 8, 9]
    draft = Grower(keys).grow(shape)
    for row, key in enumerate(keys):
        assert paths_of(draft, row) == brute_force(shape, key)[: shape.total_nodes]


def test_the_first_nodes_of_a_tree_are_the_smaller_tree():
    large = Grower([7]).grow(TreeShape(4, 3, 20))
    for size in (4, 9, 15):
        assert paths_of(large.first(torch.tensor([size]))) == paths_of(Grower([7]).grow(TreeShape(4, 3, size)))


def test_equal_values_keep_the_parents():
    draft = Grower([7], lambda *key: torch.zeros(VOCAB)).grow(TreeShape(3, 2, 3))
    assert all(parent < node for node, parent in enumerate(draft.parents[0].tolist()))
    assert len(set(paths_of(draft))) == 3


def test_rows_end_where_they_have_no_room_and_after_the_end_of_a_text():
    draft = Grower([7, 7, 7]).grow(TreeShape(3, 2, 8), room=torch.tensor([0, 1, 3]))
    assert draft.longest.tolist() == [0, 1, 3]
    assert draft.lengths.tolist()[:2] == [0, 2]
    best = int(law(7).argmax())
    draft = Grower([7]).grow(TreeShape(3, 2, 8), end_tokens=(best,))
    assert (best,) in paths_of(draft)
    assert not any(best in path[:-1] for path in paths_of(draft))


def test_what_cannot_be_drafted_is_not():
    banned = torch.tensor([True, False, True, True])
    draft = Grower([7], lambda *key: law(*key).log().masked_fill(banned, -torch.inf)).grow(TreeShape(2, 3, 9))
    assert paths_of(draft) == [(1,), (1, 1)]
    with pytest.raises(DrafterError, match="NaN"):
        Grower([7], lambda *key: torch.full((VOCAB,), torch.nan)).grow(TreeShape(2, 2, 3))


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (3, 2, 2), (2.0, 1, 2), (True, 1, 2)])
def test_impossible_shapes(numbers):
    with pytest.raises(InvalidConfigError):
        TreeShape(*numbers)


def test_a_node_sees_itself_and_its_ancestors():
    draft = tree((5, 6, 7, 8), (-1, 0, -1, 1))
    assert draft.depths.tolist() == [[1, 2, 1, 3]]
    seen = [set(row.nonzero().flatten().tolist()) for row in ancestors(draft.parents)[0]]
    assert seen == [{0}, {0, 1}, {2}, {0, 1, 3}]
    assert children_of(draft, 0) == {(-1, 5): 0, (0, 6): 1, (-1, 7): 2, (1, 8): 3}
    assert children_of(tree((5, 5), (-1, -1)), 0) == {(-1, 5): 0}


@pytest.mark.parametrize(
    ("parents", "message"), [([[1, -1]], "earlier node"), ([[-2, 0]], "earlier node"), ([[-1]], "one parent for each")]
)
def test_malformed_trees_are_refused(parents, message):
    draft = Draft(torch.tensor([[1, 2]]), torch.tensor([2]), parents=torch.tensor(parents))
    with pytest.raises(DrafterError, match=message):
        draft.check(Context.of(torch.tensor([[3]])), Budget(torch.tensor([2])), 8)


def test_a_budget_limits_the_longest_path():
    context = Context.of(torch.tensor([[3]]))
    draft = tree((5, 6, 7, 5), (-1, 0, -1, -1))
    assert draft.check(context, Budget(torch.tensor([2])), 8) is draft
    with pytest.raises(DrafterError, match="longer than its budget"):
        draft.check(context, Budget(torch.tensor([1])), 8)


class Numbers:
    """Dice whose numbers are given, `(rows, steps)`."""

    def __init__(self, numbers):
        self.numbers, self.thrown = numbers, torch.zeros(len(numbers), dtype=torch.long)

    def uniforms(self, rows):
        thrown = self.numbers[torch.arange(len(rows)), self.thrown.clamp(max=self.numbers.shape[1] - 1)]
        self.thrown += rows.long()
        return thrown


@pytest.mark.parametrize("siblings", [(1, 3), (1, 1, 3), (2, 2, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("lockstep", [False, True])
def test_siblings_drawn_with_or_without_replacement_leave_the_law_alone(siblings, lockstep):
    """For every pair of tokens, the numbers that stand for it in plain decoding lead to it, whatever stands in the tree."""
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    laws = [law(7), *(law(7, token) for token in range(VOCAB))]
    ends = [[laws[0].cumsum(0)[first], laws[1 + first].cumsum(0)[second]] for first, second in pairs.tolist()]
    widths = [[laws[0][first], laws[1 + first][second]] for first, second in pairs.tolist()]
    numbers = torch.tensor(ends) - 0.5 * torch.tensor(widths)
    for rows in pairs.split(1) if lockstep else [pairs]:
        picked = (pairs[:, None] == rows).all(-1).any(1)
        texts = Sequences(torch.full((len(rows), 1), 7), StoppingCriteriaList([MaxLengthCriteria(9)]), 0, False)
        count = len(siblings)
        draft = Draft(
            torch.tensor([siblings] * len(rows)),
            torch.full((len(rows),), count),
            parents=torch.full((len(rows), count), -1),
        )
        logits = torch.stack([laws[0], *(laws[1 + token] for token in siblings)]).log().expand(len(rows), -1, -1)
        walk = TreeWalk(texts, LogitsProcessorList(), True, Numbers(numbers[picked]), lambda *_: None, lambda: None)
        walked = (walk.in_step if lockstep else walk.by_row)(draft, logits)
        assert walked.emitted == [[a, b] if a in siblings else [a] for a, b in rows.tolist()]
