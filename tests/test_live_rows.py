"""Finished rows leave the batch, and nothing but the width of the passes shows it."""

import pytest
import torch

import hf_specdec.loop
from hf_specdec import DrafterError, EASDConfig, ExactConfig, RCSDConfig, TreeShape
from hf_specdec.drafters import AssistantDrafter
from hf_specdec.drafters.head_states import HeadStates
from hf_specdec.live_rows import worth_leaving
from tests.families import FAMILIES
from tests.networks import drafter_for
from tests.networks.copies import FIRST, attending_pair
from tests.toys import noisy_copy, prompts, tiny_llama


NUM_ROWS = 6
EOS = [3, 7, 11, 19]  # rows of the toys end at different steps
CONFIGS = {
    "model": ExactConfig(length=3, drafting="model", on_drafter_error="raise"),
    "ngram": ExactConfig(length=3, drafting="ngram", ngram_size=1, on_drafter_error="raise"),
    "hybrid": ExactConfig(length=3, drafting="hybrid", ngram_size=1, on_drafter_error="raise"),
    "default": ExactConfig(on_drafter_error="raise"),
    "easd": EASDConfig(length=3, drafting="model", entropy_threshold=0.5, on_drafter_error="raise"),
}


def decode(model, config, *, columns=9, **options):
    """The texts, the statistics, and how many rows each of the target's passes had."""
    sizes, stats = [], []
    hook = model.get_input_embeddings().register_forward_hook(lambda *each: sizes.append(len(each[2])))
    given = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 0} | options
    needs_draft = getattr(config, "drafting", "ngram") != "ngram"
    try:
        texts = model.generate(
            **prompts(NUM_ROWS, columns=columns),
            **given,
            speculative_config=config,
            assistant_model=noisy_copy(model) if needs_draft else None,
            stats_callback=stats.append,
        )
    finally:
        hook.remove()
    return texts, stats[0], sizes


@pytest.fixture
def nobody_leaves(monkeypatch):
    """Makes the decoding of its context one in which finished rows are fed padding."""

    def off():
        monkeypatch.setattr(hf_specdec.loop, "worth_leaving", lambda unfinished: False)

    return off


def plain(model, **options):
    given = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 0} | options
    return model.generate(**prompts(NUM_ROWS, columns=9), **given)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_texts_and_counts_are_those_of_the_whole_batch(name, nobody_leaves):
    model = tiny_llama()
    texts, stats, sizes = decode(model, CONFIGS[name])
    assert sizes[0] == NUM_ROWS > sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
    if name != "easd":
        assert torch.equal(texts, plain(model))
    nobody_leaves()
    expected, counted, whole = decode(model, CONFIGS[name])
    assert set(whole) == {NUM_ROWS}
    assert torch.equal(texts, expected)
    if name != "default":  # which drafts as far as the costs of its batch say
        assert [row.to_dict() for row in stats.rows] == [row.to_dict() for row in counted.rows]
    assert [row.num_new_tokens for row in stats.rows] == [row.num_new_tokens for row in counted.rows]


@pytest.mark.parametrize("name", ["model", "hybrid", "easd"])
def test_each_row_keeps_its_dice(name, nobody_leaves):
    """Whether its seeds were given or come from the global generator."""
    model, sampled = tiny_llama(), {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for seeds in ({"row_seeds": list(range(NUM_ROWS))}, {}):
        torch.manual_seed(5)
        texts, _, sizes = decode(model, CONFIGS[name], **sampled, **seeds)
        assert sizes[-1] < NUM_ROWS
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_specdec.loop, "worth_leaving", lambda unfinished: False)
            torch.manual_seed(5)
            assert torch.equal(texts, decode(model, CONFIGS[name], **sampled, **seeds)[0])


@pytest.mark.parametrize("tree", [None, TreeShape(depth=4, top_k=3, total_nodes=9)], ids=["chain", "tree"])
def test_networks_that_read_hidden_states(tree, nobody_leaves):
    """Features, the drafter's cache and the target's trees lose the same rows."""
    model, network = attending_pair()
    inputs = prompts(NUM_ROWS, columns=9)
    inputs["input_ids"].scatter_(1, inputs["attention_mask"].argmax(-1, keepdim=True), FIRST)
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": EOS, "pad_token_id": 0}
    sizes, stats, rounds = [], [], []
    hook = model.get_input_embeddings().register_forward_hook(lambda *each: sizes.append(len(each[2])))

    def ours():
        config = RCSDConfig(steps=4, tree=tree, on_drafter_error="raise")
        return model.generate(
            **inputs, **options, assistant_model=network, speculative_config=config,
            stats_callback=stats.append, round_callback=rounds.append,
        )  # fmt: skip

    texts = ours()
    hook.remove()
    assert sizes[-1] < NUM_ROWS
    assert torch.equal(texts, model.generate(**inputs, **options))
    assert stats[0].num_accepted_tokens > 0
    assert all(len(each.emitted) == len(each.num_drafted) == NUM_ROWS for each in rounds)
    nobody_leaves()
    ours()
    assert [row.to_dict() for row in stats[0].rows] == [row.to_dict() for row in stats[1].rows]


@pytest.mark.parametrize("kind", ["eagle", "eagle3-reduced"])
def test_sampled_drafts_of_networks(kind):
    model = tiny_llama()
    network = drafter_for(model, kind)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 0}
    config = RCSDConfig(steps=3, on_drafter_error="raise")
    texts = []
    for leave in (worth_leaving, lambda unfinished: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_specdec.loop, "worth_leaving", leave)
            torch.manual_seed(1)
            texts.append(
                model.generate(
                    **prompts(NUM_ROWS, columns=9), **options, assistant_model=network, speculative_config=config
                )
            )
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "mixtral", "gpt2"])
def test_families(family):
    """Windows, learned positions and experts are cut like everything else."""
    model = FAMILIES[family].build("sdpa", seed=0)
    texts, _, sizes = decode(model, CONFIGS["model"])
    assert sizes[-1] < NUM_ROWS
    assert torch.equal(texts, plain(model))


def test_positions_and_processors_of_each_row():
    """Given positions go with their row; a repetition penalty holds the padding of each row, so nobody leaves."""
    model, inputs = tiny_llama(), prompts(NUM_ROWS, columns=9)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + torch.arange(NUM_ROWS)[:, None]
    given = {"position_ids": positions, "bad_words_ids": [[5], [9]]}
    texts, _, sizes = decode(model, CONFIGS["model"], **given)
    assert sizes[-1] < NUM_ROWS
    assert torch.equal(texts, plain(model, **given))
    texts, _, sizes = decode(model, CONFIGS["model"], repetition_penalty=1.5)
    assert torch.equal(texts, plain(model, repetition_penalty=1.5))


def test_a_drafter_that_cannot_follow_is_given_up(monkeypatch):
    """Rows that leave are the loop's affair: a drafter that fails at it costs nothing but its drafts."""

    def fails(self, kept):
        raise RuntimeError("lost count")

    monkeypatch.setattr(AssistantDrafter, "keep_rows", fails)
    model = tiny_llama()
    patient = ExactConfig(length=3, drafting="model", on_drafter_error="continue")
    texts, stats, sizes = decode(model, patient)
    assert sizes[-1] < NUM_ROWS
    assert torch.equal(texts, plain(model))
    assert ["lost count" in each for each in stats.problems] == [True]
    with pytest.raises(RuntimeError, match="lost count"):
        decode(model, CONFIGS["model"])


def test_a_cache_that_is_returned_keeps_all_rows():
    model = tiny_llama()
    texts, _, sizes = decode(model, CONFIGS["model"], return_dict_in_generate=True)
    assert set(sizes) == {NUM_ROWS}
    assert torch.equal(texts.sequences, plain(model))


def test_an_eighth_of_the_rows_is_worth_it():
    rows = torch.ones(16, dtype=torch.bool)
    assert not worth_leaving(rows)
    rows[3] = False
    assert not worth_leaving(rows)
    rows[5] = False
    assert worth_leaving(rows)
    assert not worth_leaving(torch.zeros(16, dtype=torch.bool))


@pytest.mark.parametrize("tree", [None, TreeShape(depth=4, top_k=3, total_nodes=9)], ids=["chain", "tree"])
def test_a_drafter_that_fails_takes_nothing_along(tree, monkeypatch):
    """Rows leave after the failure of a drafter that reads hidden states; nobody reads them any more, nor keeps them."""
    model, network = attending_pair()
    inputs = prompts(NUM_ROWS, columns=9)
    inputs["input_ids"].scatter_(1, inputs["attention_mask"].argmax(-1, keepdim=True), FIRST)
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": EOS, "pad_token_id": 0}
    stores, sizes, stats = [], [], []

    def failing(self, context, open_rows):
        stores.append(self.features.store)
        raise RuntimeError("broken")

    monkeypatch.setattr(HeadStates, "first_logits", failing)
    hook = model.get_input_embeddings().register_forward_hook(lambda *each: sizes.append(len(each[2])))
    texts = model.generate(
        **inputs, **options, assistant_model=network, stats_callback=stats.append,
        speculative_config=RCSDConfig(steps=4, tree=tree, on_drafter_error="continue"),
    )  # fmt: skip
    hook.remove()
    assert sizes[-1] < NUM_ROWS
    assert len(stores) == stats[0].events["drafter_failed"] == 1
    assert torch.equal(texts, model.generate(**inputs, **options))
    with pytest.raises(DrafterError, match="are not known"):
        stores[0].take(torch.full((NUM_ROWS, 1), 9))


def test_drafters_whose_cache_holds_more_than_keys():
    """A sparse attention's index keys have rows as well."""
    model, draft = tiny_llama(), FAMILIES["deepseek_v32"].build("eager", seed=0)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": EOS, "pad_token_id": 0}
    sizes = []
    hook = draft.get_input_embeddings().register_forward_hook(lambda *each: sizes.append(len(each[2])))
    texts = model.generate(
        **prompts(NUM_ROWS, columns=9), **options, assistant_model=draft, speculative_config=CONFIGS["model"]
    )
    hook.remove()
    assert sizes[-1] < NUM_ROWS
    assert torch.equal(texts, plain(model))
