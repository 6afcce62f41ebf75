"""Trees in `generate`: they stop where plain decoding stops, show what it shows, and leave what it leaves."""

from functools import cache

import pytest
import torch
from transformers import EosTokenCriteria, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdec import (
    CostTable,
    DrafterError,
    EASDConfig,
    ExactConfig,
    InvalidConfigError,
    RCSDConfig,
    SelfDraftConfig,
    SpeculativeConfig,
)
from hf_specdec._compat import CACHE_KEY
from hf_specdec.acceptance import ACCEPTANCE, EASD, EarlyExactGuard, Exact
from hf_specdec.drafters import DrafterBase
from hf_specdec.lengths import GoodputTree, TreeLength
from hf_specdec.records import Draft
from hf_specdec.trees import TreeShape
from tests.networks.copies import FIRST, attending_pair
from tests.toys import prompts, state_of, tiny_llama


NEW_TOKENS = 14
CONFIG = RCSDConfig(tree=TreeShape(depth=4, top_k=3, total_nodes=9), on_drafter_error="raise")
FROZEN = CostTable(0.01, ((1, 1.0), (64, 1.5)))


@cache
def pair():
    """A target, and a drafter that would always be right, but for some noise."""
    model, network = attending_pair()
    generator = torch.Generator().manual_seed(0)
    model.get_output_embeddings().weight.data.mul_(2.0)  # so that likely paths are those of likely tokens
    for parameter in network.layers[0].mlp.parameters():
        parameter.data += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model, network


def target():
    return pair()[0]


def inputs(batch_size):
    """Prompts whose first real token is the one that the drafter never sees."""
    found = prompts(batch_size)
    found["input_ids"].scatter_(1, found["attention_mask"].argmax(-1, keepdim=True), FIRST)
    return found


def plain(batch_size=1, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    return target().generate(**inputs(batch_size), **options)


def drafter():
    return pair()[1]


def speculative(batch_size=1, config=CONFIG, **options):
    return plain(batch_size, assistant_model=drafter(), speculative_config=config, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_toys_paths_are_moved(batch_size):
    """Of several nodes, and not the first ones: or the tests below would show little."""
    rounds = []
    speculative(batch_size, round_callback=rounds.append)
    paths = [
        tuple(node for node in row if node >= 0)
        for each in rounds
        if each.path is not None
        for row in each.path.tolist()
    ]
    assert {len(path) for path in paths} >= {2, 4}
    assert any(len(path) > 1 and path != tuple(range(len(path))) for path in paths)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_end_at_every_token_that_could_end_them(batch_size):
    tokens = sorted(set(plain(batch_size)[:, 7:].flatten().tolist()))[::batch_size]
    rounds = []
    for eos in tokens:
        for options in ({"eos_token_id": eos}, {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(eos)])}):
            out = speculative(batch_size, **options, round_callback=rounds.append)
            assert torch.equal(out, plain(batch_size, **options))
    assert sum(int(each.num_accepted.sum()) for each in rounds) > len(tokens)
    for each in rounds:  # what stands after the end of a text was not accepted
        assert (each.num_accepted <= torch.tensor([len(row) for row in each.emitted])).all()


@pytest.mark.parametrize("new_tokens", range(1, 9))
def test_no_text_is_longer_than_asked(new_tokens):
    out = speculative(4, max_new_tokens=new_tokens, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(4, max_new_tokens=new_tokens))
    assert len(out.speculative_stats.drafted_at_position) <= max(0, new_tokens - 2)


class EndsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Counting(LogitsProcessor):
    """Bans another token at each call, so that it must be called once for each token and never for a rejected one."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        scores[:, (len(self.calls) * 7) % scores.shape[-1]] = -torch.inf
        self.calls.append(input_ids.tolist())
        return scores


@pytest.mark.parametrize("batch_size", [1, 4])
def test_processors_and_criteria_of_any_kind_see_each_committed_prefix_once(batch_size):
    calls = []
    for run in (plain, speculative):
        counting = Counting()
        out = run(
            batch_size,
            logits_processor=LogitsProcessorList([counting]),
            stopping_criteria=StoppingCriteriaList([EndsAt(18)]),
        )
        calls.append((out.tolist(), counting.calls))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_and_logits_are_those_of_plain_decoding(batch_size):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    expected, out = plain(batch_size, **options), speculative(batch_size, **options)
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(out[name]) == len(expected[name])
        torch.testing.assert_close(torch.stack(out[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4)


def test_repetition_is_penalised_with_each_nodes_own_prefix():
    for batch_size in (1, 4):
        out = speculative(batch_size, repetition_penalty=1.6, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain(batch_size, repetition_penalty=1.6))
        assert not torch.equal(out.sequences, plain(batch_size))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_cache_is_left_as_plain_decoding_leaves_it(batch_size):
    out = speculative(batch_size, return_dict_in_generate=True)
    expected = plain(batch_size, return_dict_in_generate=True)
    for layer, other in zip(out[CACHE_KEY].layers, expected[CACHE_KEY].layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)


def test_a_continued_cache_is_read_on():
    first = plain(return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[9, 4]])], 1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = target().generate(longer, attention_mask=torch.ones_like(longer), **options)
    out = target().generate(
        longer,
        attention_mask=torch.ones_like(longer),
        **options,
        **{CACHE_KEY: first[CACHE_KEY]},
        assistant_model=drafter(),
        speculative_config=CONFIG,
    )
    assert torch.equal(out, expected)


def test_nothing_of_the_models_is_changed():
    before, weights = state_of(target()), {name: value.clone() for name, value in drafter().state_dict().items()}
    speculative(4)
    after = state_of(target())
    assert before[:2] == after[:2]
    assert before[3:] == after[3:]
    assert all(torch.equal(value, after[2][name]) for name, value in before[2].items())
    assert all(torch.equal(value, weights[name]) for name, value in drafter().state_dict().items())


def test_the_statistics_of_trees_add_up():
    rounds = []
    out = speculative(return_dict_in_generate=True, round_callback=rounds.append)
    stats = out.speculative_stats
    assert stats.num_accepted_tokens + stats.num_rounds + 1 == stats.num_new_tokens == NEW_TOKENS
    assert stats.num_verified_tokens <= stats.num_accepted_tokens + stats.num_rounds
    assert len(stats.drafted_at_position) == 4
    assert stats.num_draft_tokens == sum(int(each.num_drafted) for each in rounds)
    for each in rounds[1:]:
        if each.path is not None:
            assert int((each.path >= 0).sum()) == int(each.num_accepted)
            assert int(each.longest) <= 4 < int(each.num_drafted) + 4


def test_accepted_nodes_are_not_fed_again():
    """A round feeds the token that the last one ended with, and its own nodes."""
    rounds, widths = [], []
    hook = target().get_input_embeddings().register_forward_hook(lambda *each: widths.append(each[1][0].shape[1]))
    try:
        speculative(round_callback=rounds.append)
    finally:
        hook.remove()
    assert widths[1:] == [int(each.num_drafted) + 1 for each in rounds[1:]]
    assert sum(int(each.num_accepted) for each in rounds) > 2


# --- auto -----------------------------------------------------------------------------------------------------------


def test_an_automatic_tree_with_frozen_costs_is_a_function_of_the_text():
    config = RCSDConfig(tree="auto", length=GoodputTree(costs=FROZEN), on_drafter_error="raise")
    runs = [speculative(4, config, return_dict_in_generate=True) for _ in range(2)]
    assert torch.equal(runs[0].sequences, plain(4))
    counts = [run.speculative_stats.num_draft_tokens for run in runs]
    assert counts[0] == counts[1] > 0


def test_an_automatic_tree_that_never_pays_is_not_drafted_for_long():
    costs = CostTable(5.0, ((1, 1.0), (64, 2.0)))
    config = RCSDConfig(tree="auto", length=GoodputTree(costs=costs), on_drafter_error="raise")
    out = speculative(1, config, max_new_tokens=14, return_dict_in_generate=True)
    assert sum(out.speculative_stats.drafted_at_position[:1]) == 1


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_columns_of_a_tree_are_not_shown(name):
    with pytest.raises(InvalidConfigError, match=f"{name}.*tree=None"):
        speculative(return_dict_in_generate=True, **{name: True})


def test_a_draft_model_drafts_no_trees():
    with pytest.raises(InvalidConfigError, match=r"needs a drafter network.*LlamaForCausalLM"):
        plain(assistant_model=tiny_llama(seed=2), speculative_config=CONFIG)


class TreeOfTwo(DrafterBase):
    def propose(self, context, budget):
        rows = context.batch_size
        return Draft(
            torch.ones(rows, 2, dtype=torch.long),
            torch.full((rows,), 2),
            parents=torch.tensor([[-1, -1]]).expand(rows, -1),
        )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (EASDConfig(drafting="model", on_drafter_error="raise"), "EASD judges chains only"),
        (SpeculativeConfig(drafting="model", on_drafter_error="raise"), "this run judges chains only"),
    ],
)
def test_a_tree_of_a_users_own_is_refused_where_chains_are_judged(config, name):
    with pytest.raises(DrafterError, match=f"TreeOfTwo drafted a tree, and {name}"):
        plain(assistant_model=TreeOfTwo, speculative_config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "large"}, 'None, "auto" or a TreeShape'),
        ({"tree": "auto", "drafting": "hybrid"}, "alone"),
        ({"tree": "auto", "length": 4}, "both say how far"),
        ({"tree": TreeShape(), "length": GoodputTree()}, "both say how far"),
        ({"length": GoodputTree()}, 'tree="auto"'),
        ({"tree": "auto", "acceptance": "typical"}, "Typical judges chains only"),
        ({"tree": TreeShape(), "acceptance": EASD()}, "EASD judges chains only"),
    ],
)
def test_contradicting_options(options, message):
    with pytest.raises(InvalidConfigError, match=message):
        RCSDConfig(**options)


NEEDED = {"judge": {"judge": lambda evidence: evidence.scores.new_ones(1)}, "relaxed_thinking": {"end_token_id": 5}}


@pytest.mark.parametrize("name", sorted(ACCEPTANCE))
def test_every_relaxed_rule_is_refused_by_name(name):
    rule = ACCEPTANCE[name](**NEEDED.get(name, {}))
    for acceptance in [rule] if name in NEEDED else [name, rule]:
        if rule.lossless:
            assert RCSDConfig(tree="auto", acceptance=acceptance).rule.lossless
        else:
            with pytest.raises(InvalidConfigError, match=f"{type(rule).__name__} judges chains only"):
                RCSDConfig(tree="auto", acceptance=acceptance)


@pytest.mark.parametrize("length", [GoodputTree(), TreeLength()])
@pytest.mark.parametrize("config", [ExactConfig, EASDConfig, SpeculativeConfig, SelfDraftConfig])
def test_lengths_of_trees_are_refused_where_no_tree_is_drafted(config, length):
    with pytest.raises(
        InvalidConfigError, match=f"{type(length).__name__} sizes trees, which {config.__name__} does not draft"
    ):
        config(length=length)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        RCSDConfig(tree="auto"),
        RCSDConfig(tree="auto", length=GoodputTree(TreeShape(3, 2, 8), (2, 4), FROZEN)),
        RCSDConfig(acceptance="topk", guard=None),
        RCSDConfig(acceptance=EASD(top_n=3)),
    ],
)
def test_configs_of_trees_are_saved_and_read(config, tmp_path):
    config.save_pretrained(tmp_path)
    assert RCSDConfig.from_pretrained(tmp_path) == config


def test_the_stock_option_contradicts_a_tree():
    with pytest.raises(InvalidConfigError, match="both say how far"):
        speculative(num_assistant_tokens=3)


def test_the_costs_that_sized_trees_are_in_the_statistics():
    frozen = RCSDConfig(tree="auto", length=GoodputTree(costs=FROZEN), on_drafter_error="raise")
    assert speculative(2, frozen, return_dict_in_generate=True).speculative_stats.costs == FROZEN
    auto = RCSDConfig(tree="auto", on_drafter_error="raise")
    measured = speculative(2, auto, return_dict_in_generate=True).speculative_stats.costs
    assert measured.draft_step > 0
    again = RCSDConfig(tree="auto", length=GoodputTree(costs=measured), on_drafter_error="raise")
    assert speculative(2, again, return_dict_in_generate=True).speculative_stats.costs == measured
    assert speculative(2, CONFIG, return_dict_in_generate=True).speculative_stats.costs is None


def test_a_network_drafts_chains_for_other_rules_behind_their_guard():
    """The law of CSD and its kin over a network, in the network's own preset."""
    guarded = RCSDConfig(acceptance="topk", guard=3, on_drafter_error="raise")
    assert guarded.rule == EarlyExactGuard(ACCEPTANCE["topk"](), 3)
    assert RCSDConfig(acceptance="topk").rule == SpeculativeConfig(acceptance="topk").rule
    assert RCSDConfig(guard=3).rule == ExactConfig(guard=3).rule == RCSDConfig().rule == Exact()
    for config in (RCSDConfig, ExactConfig):
        with pytest.raises(InvalidConfigError, match="guard must be"):
            config(guard=-1)
    out = speculative(2, guarded, return_dict_in_generate=True)
    assert not out.speculative_stats.lossless
    wholly_exact = RCSDConfig(acceptance="topk", guard=NEW_TOKENS, on_drafter_error="raise")
    assert torch.equal(speculative(2, wholly_exact), plain(2))
