"""The logits of a tree's nodes, and the cache that one path leaves, against passes without any cache."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_specdec import UnsupportedModelError
from hf_specdec._compat import CACHE_KEY, TREE_CLASSES
from hf_specdec.records import Draft
from hf_specdec.tree_lm import TreeLM, check_tree_target
from tests.families import FAMILIES, REFUSED
from tests.toys import prompts, tiny_llama


NAMES = "gemma3 llama mistral qwen2-sliding".split()
DEPTH = 4


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@cache
def target(name, attention):
    return FAMILIES[name].build(attention)


class Walk:
    """Rounds of random trees, of which a random path is kept."""

    def __init__(self, model, batch_size, seed=0):
        inputs = prompts(batch_size, columns=12)
        self.mask = inputs["attention_mask"]
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(**inputs, position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
        self.model, self.generator = model, torch.Generator().manual_seed(seed)
        self.moves = []
        self.lm = TreeLM(
            model,
            prompt_mask=self.mask,
            cache=cache,
            held=inputs["input_ids"],
            moved=lambda *each: self.moves.append(each),
        )
        self.texts = [row.tolist() for row in inputs["input_ids"]]
        self.commit([[] for _ in self.texts])

    def random(self, most):
        return int(torch.randint(most + 1, (), generator=self.generator))

    def commit(self, paths):
        for text, path in zip(self.texts, paths, strict=True):
            text.extend([*path, 1 + self.random(62)])

    def tree(self):
        width = 7
        lengths = torch.tensor([self.random(width) for _ in self.texts])
        lengths[self.random(len(self.texts) - 1)] = width
        parents = torch.full((len(self.texts), width), -1)
        depths = [[0] * width for _ in self.texts]
        for row in range(len(self.texts)):
            for node in range(width):
                parent = self.random(node) - 1
                if parent >= 0 and depths[row][parent] < DEPTH:
                    parents[row, node], depths[row][node] = parent, depths[row][parent] + 1
        tokens = torch.randint(1, 64, parents.shape, generator=self.generator)
        return Draft(tokens, lengths, parents=parents)

    def round(self, tree):
        lengths = torch.tensor([len(text) for text in self.texts])
        tokens = torch.zeros(len(self.texts), int(lengths.max()), dtype=torch.long)
        for row, text in enumerate(self.texts):
            tokens[row, : len(text)] = torch.tensor(text)
        return self.lm.run_tree(tokens, lengths, tree).logits

    def paths(self, tree, row):
        """The tokens up to each node, and the nodes."""
        tokens, nodes = [[]], [[]]
        for node in range(int(tree.lengths[row])):
            above = int(tree.parents[row, node]) + 1
            tokens.append([*tokens[above], int(tree.tokens[row, node])])
            nodes.append([*nodes[above], node])
        return tokens, nodes

    def keep(self, tree):
        """Keeps a random path of each row."""
        path, kept = torch.full((len(self.texts), DEPTH + 1), -1), []
        for row in range(len(self.texts)):
            tokens, nodes = self.paths(tree, row)
            chosen = self.random(len(nodes) - 1)
            path[row, : len(nodes[chosen])] = torch.tensor(nodes[chosen], dtype=torch.long)
            kept.append(tokens[chosen])
        self.lm.keep_path(path)
        self.commit(kept)
        return path

    def reference(self, row, tail):
        text = [*self.texts[row], *tail][int((self.mask[row] == 0).sum()) :]
        return self.model(torch.tensor([text])).logits[0, -1]

    def assert_exact(self, tree, logits):
        for row in range(len(self.texts)):
            for place, tail in enumerate(self.paths(tree, row)[0]):
                torch.testing.assert_close(logits[row, place], self.reference(row, tail), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_each_node_sees_what_it_would_see_in_a_chain(name, attention, batch_size):
    if attention not in FAMILIES[name].attentions:
        pytest.skip("not supported by the family")
    walk = Walk(target(name, attention), batch_size)
    for _ in range(6):
        tree = walk.tree()
        walk.assert_exact(tree, walk.round(tree))
        walk.keep(tree)
    num_fed = int((walk.lm.fed_columns >= 0).sum(-1).max())
    assert (
        num_fed <= 7 + 1 + 1
    )  # the accepted nodes are not fed again: a bonus token, and what realignment may have cost


def test_accepted_nodes_are_not_fed_again_and_chains_may_follow():
    walk = Walk(target("mistral", "sdpa"), 4)
    tree = walk.tree()
    walk.round(tree)
    walk.keep(tree)
    lengths = torch.tensor([len(text) for text in walk.texts])
    tokens = torch.zeros(4, int(lengths.max()), dtype=torch.long)
    for row, text in enumerate(walk.texts):
        tokens[row, : len(text)] = torch.tensor(text)
    logits = walk.lm.score(tokens, lengths, torch.ones_like(lengths))
    assert walk.lm.fed_columns.shape == (4, 1)
    for row in range(4):
        torch.testing.assert_close(logits[row, 0], walk.reference(row, []), rtol=1e-4, atol=1e-4)


def test_moves_are_told_column_by_column():
    walk = Walk(tiny_llama(), 1)
    tree = Draft(torch.tensor([[3, 4, 5]]), torch.tensor([3]), parents=torch.tensor([[-1, -1, 1]]))
    walk.round(tree)
    start = len(walk.texts[0])
    walk.lm.keep_path(torch.tensor([[1, 2, -1]]))
    ((source, moved_to),) = walk.moves
    assert source.tolist() == [[start + 1, start + 2, -1]]
    assert moved_to.tolist() == [[start, start + 1, -1]]


def test_a_path_that_is_in_place_is_not_moved():
    walk = Walk(tiny_llama(), 1)
    tree = Draft(torch.tensor([[3, 4, 5]]), torch.tensor([3]), parents=torch.tensor([[-1, 0, 0]]))
    walk.round(tree)
    before = [layer.keys.data_ptr() for layer in walk.lm.cache.layers]
    walk.lm.keep_path(torch.tensor([[0, 1]]))
    assert before == [layer.keys.data_ptr() for layer in walk.lm.cache.layers]
    assert walk.moves == []


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt", "gemma3n"])
def test_a_model_that_is_not_known_to_take_trees_is_refused_by_name(name):
    model = (FAMILIES | REFUSED)[name].build()
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} is not known.*tree=None"):
        check_tree_target(model, DynamicCache(config=model.config))


def test_attention_and_cache_are_asked():
    model = tiny_llama()
    check_tree_target(model, DynamicCache(config=model.config))
    with pytest.raises(UnsupportedModelError, match="StaticCache"):
        check_tree_target(model, StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(UnsupportedModelError, match="offloading"):
        check_tree_target(model, DynamicCache(config=model.config, offloading=True))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*attn_implementation"):
        check_tree_target(model, DynamicCache(config=model.config))


def test_known_classes_are_classes_of_the_toys():
    """What says that trees work on a class is the test that compares their texts, so each has a toy."""
    names = {type(family.build()).__name__ for family in FAMILIES.values()}
    assert names >= TREE_CLASSES
