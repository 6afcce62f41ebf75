"""Trees of drafter networks leave greedy texts and sampled laws as they are, whatever the target's family."""

from functools import cache
from itertools import product

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import hf_specdec.generation
from hf_specdec import RCSDConfig, UnsupportedModelError
from hf_specdec._compat import TREE_CLASSES
from hf_specdec.trees import TreeShape
from tests.families import FAMILIES
from tests.networks.copies import FIRST, attending_pair, recalling_pair
from tests.networks.test_lossless import NEW_TOKENS, PROMPT, TARGETS, drafter, plain, small_drafter, small_vocabulary
from tests.networks.test_lossless import target as target_of
from tests.test_families import ONE_PROMPT, RAGGED_PROMPTS, assert_same, prompts


CONFIG = RCSDConfig(tree=TreeShape(depth=4, top_k=3, total_nodes=9), on_drafter_error="raise")


@pytest.mark.parametrize("lengths", [ONE_PROMPT, RAGGED_PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_texts_are_the_targets_own(name, family, lengths):
    output = target_of(name).generate(
        **prompts(lengths),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        assistant_model=drafter(name, family),
        speculative_config=CONFIG,
    )
    assert_same(output.sequences, plain(name, lengths), NEW_TOKENS)
    stats = output.speculative_stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert len(stats.drafted_at_position) == 4
    if lengths == RAGGED_PROMPTS:
        assert stats.num_accepted_tokens > 0


OTHERS = [name for name in FAMILIES if name not in TARGETS]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_class_gives_its_own_texts_or_is_refused_by_name(name):
    """With a drafter that is right by accident, often enough for paths to be moved."""
    model = FAMILIES[name].build(FAMILIES[name].attentions[-1])
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    config = RCSDConfig(tree=TreeShape(depth=2, top_k=8, total_nodes=60), on_drafter_error="raise")

    def with_trees():
        network = hf_specdec.AutoDrafter.from_target(model, "eagle")
        return model.generate(**prompts(RAGGED_PROMPTS), **options, assistant_model=network, speculative_config=config)

    if type(model).__name__ not in TREE_CLASSES:
        with pytest.raises(UnsupportedModelError, match=type(model).__name__):
            with_trees()
        return
    expected = model.generate(**prompts(RAGGED_PROMPTS), **options, output_logits=True)
    output = with_trees()
    assert_same(output.sequences, expected, 10)
    assert output.speculative_stats.num_accepted_tokens > 0


# --- always right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 2, 6), (6, 4, 24), (4, 1, 4)])
@pytest.mark.parametrize("pair", [attending_pair, recalling_pair])
def test_a_drafter_that_copies_its_target_is_always_right(pair, shape):
    """tau, the tokens per round, is then the depth of the tree and the bonus token, where laws are so sharp that the likeliest
    path is that of the likeliest tokens."""
    model, network = pair()
    heads = {id(head): head for head in (model.get_output_embeddings(), getattr(network, "lm_head", None)) if head}
    for head in heads.values():
        head.weight.data.mul_(50.0)
    shape = TreeShape(*shape)
    inputs = {"input_ids": torch.tensor([[FIRST, 5, 9, 3]]), "attention_mask": torch.ones(1, 4).long()}
    options = {"max_new_tokens": 1 + 5 * (shape.depth + 1), "do_sample": False}
    expected = model.generate(**inputs, **options)
    out = model.generate(
        **inputs,
        **options,
        assistant_model=network,
        speculative_config=RCSDConfig(tree=shape, on_drafter_error="raise"),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, expected)
    assert out.speculative_stats.tokens_per_round == shape.depth + 1
    assert out.speculative_stats.acceptance_rate == 1.0


# --- sampling -------------------------------------------------------------------------------------------------------

VOCAB_SIZE, LENGTH = 8, 3
SETTINGS = {
    "T=1": {},
    "T=2,top_k=4": {"temperature": 2.0, "top_k": 4},
    "repetition": {"repetition_penalty": 1.7},
}


def processors(setting):
    options = SETTINGS[setting]
    if "repetition_penalty" in options:
        return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])])
    if "temperature" in options:
        return LogitsProcessorList([TemperatureLogitsWarper(2.0), TopKLogitsWarper(4)])
    return LogitsProcessorList()


@cache
def intervals(name, setting):
    """For each text that the target can produce, the numbers in [0, 1) that stand for each of its tokens, as plain decoding
    would draw them: from logits computed without a cache."""
    found = []
    model, chain = small_vocabulary(name), processors(setting)
    for text in product(range(VOCAB_SIZE), repeat=LENGTH):
        bounds = []
        for step, token in enumerate(text):
            prefix = torch.tensor([[*PROMPT, *text[:step]]])
            law = law_after(model, chain, prefix)
            end = float(law[: token + 1].sum())
            bounds.append((end - float(law[token]), end))
        if all(high - low > 1e-5 for low, high in bounds):
            found.append((text, tuple(bounds)))
    return found


LAWS = {}


def law_after(model, chain, prefix):
    key = (id(model), str(chain), tuple(prefix[0].tolist()))
    if key not in LAWS:
        with torch.no_grad():
            LAWS[key] = chain(prefix, model(prefix).logits[:, -1].float()).double().softmax(-1)[0]
    return LAWS[key]


class Script:
    """Dice whose numbers are given in advance, one for each token of each row."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.thrown = [0] * len(numbers)

    def uniforms(self, rows):
        result = torch.full((len(self.numbers),), 0.5, dtype=torch.float64)
        for row in rows.nonzero()[:, 0].tolist():
            result[row] = self.numbers[row][min(self.thrown[row], LENGTH - 1)]
            self.thrown[row] += 1
        return result

    def keep_rows(self, kept):
        self.numbers = [self.numbers[row] for row in kept.tolist()]
        self.thrown = [self.thrown[row] for row in kept.tolist()]


@pytest.mark.parametrize("edge", [0.001, 0.999])
@pytest.mark.parametrize(
    ("name", "family", "setting", "batching"),
    [
        *((name, family, "T=1", "ragged") for name in TARGETS for family in ("eagle", "eagle3")),
        ("llama", "eagle", "T=2,top_k=4", "ragged"),
        ("llama", "eagle", "repetition", "ragged"),
        ("llama", "eagle3", "repetition", "lockstep"),
    ],
)
def test_the_sampled_law_is_the_targets_by_enumeration(monkeypatch, name, family, setting, batching, edge):
    """Both ends of the interval of each token lead to the token, and drawing is monotone: so do all numbers in between.

    The numbers that lead to a text are then a box whose volume is the product of the target's probabilities.
    """
    texts = intervals(name, setting)
    assert len(texts) >= 4**LENGTH
    numbers = [[low + edge * (high - low) for low, high in bounds] for _, bounds in texts]
    monkeypatch.setattr(hf_specdec.generation, "RandomStreams", lambda *_: Script(numbers))
    out = small_vocabulary(name).generate(
        torch.tensor([PROMPT]).expand(len(texts), -1),
        attention_mask=torch.ones(len(texts), len(PROMPT)).long(),
        assistant_model=small_drafter(name, family),
        speculative_config=RCSDConfig(tree=TreeShape(2, 3, 6), on_drafter_error="raise", batching=batching),
        do_sample=True,
        max_new_tokens=LENGTH,
        return_dict_in_generate=True,
        pad_token_id=0,
        **{"top_k": 0, **SETTINGS[setting]},
    )
    assert out.sequences[:, len(PROMPT) :].tolist() == [list(text) for text, _ in texts]
    stats = out.speculative_stats
    assert stats.num_accepted_tokens > 0
    if batching == "ragged":
        assert stats.num_accepted_tokens < stats.num_verified_tokens


@pytest.mark.parametrize("lengths", [ONE_PROMPT, RAGGED_PROMPTS], ids=["one", "ragged"])
def test_a_seed_gives_the_same_text_with_trees_of_any_size(lengths):
    """So `tree="auto"` may follow the clock."""
    texts = []
    for tree in (TreeShape(1, 1, 1), TreeShape(3, 4, 12), TreeShape(5, 2, 10), "auto"):
        torch.manual_seed(5)
        out = target_of("llama").generate(
            **prompts(lengths),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            pad_token_id=0,
            assistant_model=drafter("llama", "eagle"),
            speculative_config=RCSDConfig(tree=tree, on_drafter_error="raise"),
        )
        texts.append(out.tolist())
    assert texts.count(texts[0]) == len(texts)
