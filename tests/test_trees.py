"""Trees: the dynamic one against brute force, and the laws of verification by enumeration."""

from itertools import pairwise, permutations, product
from math import prod

import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.trees import DraftTree, TreeShape, acceptance_steps, accepted_path, grow_tree, sampled_child


VOCAB = 4


def law(*key, sharpness=1.5, vocab=VOCAB):
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.softmax(sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def log_probs(paths):
    return torch.stack([law(7, *path).log() for path in paths])


def value(path):
    return sum(float(law(7, *path[:i]).log()[token]) for i, token in enumerate(path))


@pytest.mark.parametrize("total", [3, 5, 9])
def test_with_every_token_expanded_the_likeliest_paths_are_kept(total):
    tree = grow_tree(TreeShape(3, VOCAB**2, total), lambda paths: log_probs(paths).repeat(1, 4).index_fill(
        1, torch.arange(VOCAB, 4 * VOCAB), -torch.inf))  # fmt: skip
    everything = [path for depth in (1, 2, 3) for path in product(range(VOCAB), repeat=depth)]
    assert set(paths_of(tree)) == set(sorted(everything, key=value, reverse=True)[:total])


def test_a_layer_expands_its_best_nodes_only():
    asked = []
    tree = grow_tree(TreeShape(3, 2, 6), lambda paths: asked.append(list(paths)) or log_probs(paths))
    assert asked[0] == [()]
    for before, layer in pairwise(asked):
        children = [(*path, int(token)) for path in before for token in law(7, *path).topk(2).indices]
        assert layer == sorted(children, key=value, reverse=True)[:2]
    assert len(tree.tokens) == len(set(paths_of(tree))) == 6


def test_equal_values_keep_the_parents():
    tree = grow_tree(TreeShape(3, 1, 3), lambda paths: torch.zeros(len(paths), VOCAB))
    assert tree.parents == (-1, 0, 1)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (3, 2, 2)])
def test_impossible_shapes(numbers):
    with pytest.raises(InvalidConfigError):
        TreeShape(*numbers)


def test_a_node_sees_itself_and_its_ancestors():
    tree = DraftTree((5, 6, 7, 8), (-1, 0, -1, 1))
    assert tree.depths() == (1, 2, 1, 3)
    seen = [set(row.nonzero().flatten().tolist()) for row in tree.attends()]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 3}, {0, 1, 2, 4}]
    with pytest.raises(ValueError, match="before it"):
        DraftTree((1, 2), (1, -1))


def test_following_the_target_emits_exactly_what_it_says():
    """Each assignment of target tokens to the nodes: the text is the one that the target decodes step by step."""
    tree = DraftTree((0, 1, 1, 2, 0), (-1, -1, 0, 0, 2))
    paths = {(): -1} | {path: node for node, path in enumerate(paths_of(tree))}
    for chosen in product(range(3), repeat=1 + len(tree.tokens)):
        text = ()
        while text in paths:
            text = (*text, chosen[paths[text] + 1])
        nodes, bonus = accepted_path(tree, chosen)
        assert (*(tree.tokens[node] for node in nodes), bonus) == text


def test_a_tree_that_copies_the_target_is_accepted_to_its_depth():
    tree = grow_tree(TreeShape(4, 2, 8), log_probs)
    chosen = [int(law(7, *path).argmax()) for path in [(), *paths_of(tree)]]
    nodes, _ = accepted_path(tree, chosen)
    assert len(nodes) + 1 == 4 + 1


def draw_probability(q, candidates, replacement):
    """Of drawing these siblings in this order."""
    if replacement:
        return prod(float(q[token]) for token in candidates)
    probability, left = 1.0, 1.0
    for token in candidates:
        probability *= float(q[token]) / left
        left -= float(q[token])
    return probability


def emitted_law(p, q, width, replacement):
    total = torch.zeros_like(p)
    draws = product(range(len(p)), repeat=width) if replacement else permutations(range(len(p)), width)
    for candidates in draws:
        reached = draw_probability(q, candidates, replacement)
        rest = p
        steps = acceptance_steps(p, q, candidates, replacement=replacement)
        for token, (accepted, rest) in zip(candidates, steps, strict=True):  # noqa: B007 (the last one is used)
            total[token] += reached * accepted
            reached *= 1 - accepted
        total += reached * rest
    return total


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_recursive_rejection_keeps_the_law(replacement, width, seed):
    p, q = law(seed), law(seed, 1, sharpness=3.0)
    if seed == 1:
        q = p
    if seed == 2:
        p = torch.tensor([0.0, 0.7, 0.3, 0.0], dtype=torch.float64)
    if seed == 3:
        q = torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=torch.float64)
        width = min(width, 2) if not replacement else width
    torch.testing.assert_close(emitted_law(p, q, width, replacement), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("replacement", [True, False])
def test_the_dice_decide_as_the_steps_say(replacement):
    p, q, candidates = law(3), law(4), (2, 0, 1)
    steps = list(acceptance_steps(p, q, candidates, replacement=replacement))
    for wanted in (0, 1, 2, None):
        dice = [each - 1e-9 if index == wanted else each for index, (each, _) in enumerate(steps)]
        first = next((index for index, each in enumerate(dice) if each < steps[index][0]), None)
        index, rest = sampled_child(p, q, candidates, dice, replacement=replacement)
        assert index == first == wanted
        if wanted is None:
            assert torch.equal(rest, steps[-1][1])


def test_siblings_without_replacement_are_distinct():
    with pytest.raises(ValueError, match="distinct"):
        list(acceptance_steps(law(1), law(2), (1, 1), replacement=False))
