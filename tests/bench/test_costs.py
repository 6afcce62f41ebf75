"""The cost model and the figures drawn from it."""

import dataclasses
import json

import pytest
import torch

from hf_specdec import NucleusConfig, SelfDraftConfig, SpeculativeConfig, TreeShape
from hf_specdec._compat import CACHE_KEY
from hf_specdec.bench import (
    CostLog,
    CostMeter,
    Costs,
    Row,
    check_arms,
    measure_costs,
    parse_arm,
    summarize,
    widest_pass,
)
from hf_specdec.bench.costs import _Passes
from hf_specdec.bench.report import markdown
from hf_specdec.errors import InvalidConfigError
from hf_specdec.prefix_lm import PrefixLM
from tests.families import FAMILIES
from tests.networks import drafter_for, small_target
from tests.toys import noisy_copy, prompts, tiny_llama


COSTS = Costs({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.4}, draft_step=0.25, prefix_length=8)


def row(arm, tokens, seconds, rounds=(), **stats):
    known = {"num_verified_tokens": 4, "num_accepted_tokens": 3, "accepted_at_position": [2, 1], "lossless": True}
    stats = {**known, "events": {}, **stats} if rounds else {}
    recorded = [
        [drafted, emitted, source, [[source, drafted]] if drafted else []] for drafted, emitted, source in rounds
    ]
    return Row(arm, 0, tokens, "", len(tokens), seconds, seconds, recorded, stats, len(rounds) or len(tokens))


def test_costs_in_plain_steps():
    assert COSTS.c == 0.25
    assert COSTS.v(0) == 1.0
    assert COSTS.v(3) == 1.4
    assert COSTS.pass_seconds(6) == pytest.approx(1.8)  # the last slope goes on


def test_prediction_for_a_constant_length_is_the_textbook_formula():
    plain, ours = row("plain", [1] * 8, 8.0), row("model", [1] * 8, 5.0, [[3, 4, "model"], [3, 4, "model"]])
    expected = 4 / (3 * COSTS.c + COSTS.v(3))  # tau / (g c + v(g))
    assert summarize([plain, ours], COSTS)["model"]["predicted_speedup"] == pytest.approx(expected)


def test_ngram_drafts_cost_nothing():
    plain, ours = row("plain", [1] * 4, 4.0), row("ngram", [1] * 4, 2.0, [[3, 4, "ngram"]])
    assert summarize([plain, ours], COSTS)["ngram"]["predicted_speedup"] == pytest.approx(4 / 1.4)


def test_summary_figures_by_hand():
    rows = [row("plain", [1, 2, 3, 4], 4.0), row("model", [1, 2, 3, 4], 2.0, [[3, 3, "model"], [1, 1, "model"]])]
    figures = summarize(rows, COSTS)
    assert figures["plain"] == {
        "num_prompts": 1, "num_tokens": 4, "tokens_per_second": 1.0, "speedup": 1.0, "prefill_seconds": 0.0,
        "tokens_per_round": 1.0, "peak_memory": None, "predicted_speedup": None, "loop_efficiency": None,
        "ceiling_speedup": None, "oracle_speedup": None, "best_constant": None, "lossless": True, "text_equal": 1.0,
    }  # fmt: skip
    ours = figures["model"]
    assert (ours["speedup"], ours["tokens_per_round"], ours["acceptance_rate"]) == (2.0, 2.0, 0.75)
    assert ours["accepted_at_position"] == [1.0, 0.5]
    assert ours["replayed_tokens_per_second"] == pytest.approx(
        ours["predicted_speedup"]
    )  # plain makes one token a second
    assert ours["loop_efficiency"] == pytest.approx(2.0 / ours["predicted_speedup"])
    assert ours["theoretical_limit"] == 2.0  # tokens per round; a draft step alone would allow 4
    by_length = [sum(0.75**i for i in range(g + 1)) / (0.25 * g + COSTS.v(g)) for g in range(12)]
    assert ours["leviathan_limit"] == pytest.approx(max(by_length))
    dear = summarize(rows, dataclasses.replace(COSTS, draft_step=0.8))["model"]
    assert dear["theoretical_limit"] == pytest.approx(1 / 0.8)
    lookup = [rows[0], row("ngram", [1, 2, 3, 4], 2.0, [[3, 3, "ngram"], [1, 1, "ngram"]])]
    assert summarize(lookup, dataclasses.replace(COSTS, draft_step=0.8))["ngram"]["theoretical_limit"] == 2.0
    assert "`model`: 2.00x at most, " in markdown({"tasks": figures}, {})


def test_different_tokens_are_seen():
    rows = [row("plain", [1, 2, 3], 3.0), dataclasses.replace(row("plain", [1, 2, 4], 3.0), arm="other")]
    assert summarize(rows, None)["other"]["text_equal"] == 0.0


def test_texts_of_sampled_runs_are_not_compared():
    rows = [row("plain", [1, 2, 3], 3.0), dataclasses.replace(row("plain", [1, 2, 4], 3.0), arm="other")]
    assert summarize(rows, None, sampled=True)["other"]["text_equal"] is None


def test_what_is_timed_is_the_bare_model(monkeypatch):
    """Every pass is one call over its own tokens, after the same prefix, and nothing of this package is in it."""
    model, fed = tiny_llama(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(
            (kwargs["input_ids"].shape[1], int(kwargs[CACHE_KEY].get_seq_length()))
        ),
        with_kwargs=True,
    )
    monkeypatch.delattr(PrefixLM, "run")
    measure_costs(model, None, prefix_length=16, widest=3, repeats=2)
    assert fed == [(16, 0), (1, 16), (1, 16), (2, 16), (3, 16)] * 2  # the first step of a turn is not timed


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_pass_leaves_nothing_behind(name):
    """Full and sliding caches: after passes of any width the next one sees the prefix and no more."""
    model, tokens = FAMILIES[name].build(), prompts(columns=24)["input_ids"]
    passes = _Passes(model, tokens, 16)
    for width in (3, 1, 8, 2, 5):
        assert passes.seconds(width) > 0
        with torch.no_grad():
            logits = passes._call(tokens[:, 16 : 16 + width]).logits
            passes.cache.crop(-width)
            expected = model(tokens[:, : 16 + width], use_cache=False).logits[:, 16:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_measuring_gives_every_width():
    model = tiny_llama()
    costs = measure_costs(model, noisy_copy(model), prefix_length=16, widest=3, repeats=2)
    assert sorted(costs.target) == [1, 2, 3]
    assert all(seconds > 0 for seconds in costs.target.values())
    assert costs.draft_step > 0
    assert measure_costs(model, None, prefix_length=8, widest=2, repeats=1).c is None


class Slowing:
    """A meter of two widths and a draft step, on a machine that takes longer from turn to turn."""

    prefix_length, batch_size = 8, 1

    def __init__(self, *paces):
        self.paces = list(paces)

    def turn(self):
        pace = self.paces.pop(0)
        return {"target": [1.0 * pace, 1.2 * pace], "draft": [0.25 * pace, 0.25 * pace]}


def test_each_prompt_is_judged_by_the_pace_of_its_time(tmp_path):
    """A machine that is twice as slow for the second prompt is so for plain decoding and for the passes alike."""
    log = CostLog(Slowing(1.0, 1.0, 2.0, 2.0), tmp_path / "costs.jsonl")
    for number in (0, 1):
        log.measure(number)
    assert log.typical.target[1] == 1.0
    for number in (2, 3, 3):
        log.measure(number)
    assert log.typical.target == {1: 1.5, 2: pytest.approx(1.8)}
    taken = [log.beside(prompt).target[1] for prompt in range(3)]
    assert taken == pytest.approx([1.0, 1.5, 2.0])
    assert log.beside(1).draft_step == pytest.approx(0.375)
    rows = [
        dataclasses.replace(row(arm, [1] * 4, seconds * pace, rounds), prompt=prompt)
        for prompt, pace in ((0, 1.0), (2, 2.0))
        for arm, seconds, rounds in (("plain", 4.0, ()), ("model", 3.0, [[1, 2, "model"], [1, 2, "model"]]))
    ]
    figures = summarize(rows, log)["model"]
    assert figures["predicted_speedup"] == pytest.approx(2 / (0.25 + 1.2))
    assert figures["best_constant"]["by_length"] == pytest.approx({0: 1.0, 1: 2 / (0.25 + 1.2)})
    again = CostLog(Slowing(9.0), tmp_path / "costs.jsonl")
    for number in (0, 3):
        again.measure(number)
    assert again.turns == log.turns


def test_a_turn_holds_a_draft_step_beside_each_width():
    model = tiny_llama()
    turn = CostMeter(model, noisy_copy(model), prefix_length=16, widest=3).turn()
    assert {name: len(each) for name, each in turn.items()} == {"widths": 3, "target": 3, "draft": 3}


def test_wide_passes_are_measured_as_far_as_the_arms_need_them():
    model = tiny_llama()
    for widest, wide in ((9, []), (11, [11]), (17, [12, 17]), (25, [12, 17, 25])):
        meter = CostMeter(model, None, prefix_length=4, widest=widest)
        assert meter.widths == [*range(1, 10), *wide]
    costs = measure_costs(model, None, prefix_length=4, widest=17, repeats=1)
    assert list(costs.target) == meter.widths[:-1]
    assert costs.pass_seconds(14) == pytest.approx(costs.target[12] + (costs.target[17] - costs.target[12]) * 2 / 5)
    arms = {"plain": 1, "model-3": 4, "ngram-20": 21, "default": 17, "hybrid": 17, "tree": 1, "self-draft": 1}
    assert {name: widest_pass([parse_arm(name)]) for name in arms} == arms
    assert widest_pass([parse_arm(name) for name in arms]) == 21


def test_between_measured_widths_runs_a_straight_line():
    costs = Costs({1: 1.0, 2: 1.1, 6: 1.9, 10: 1.7}, draft_step=None, prefix_length=8)
    seconds = [costs.pass_seconds(width) for width in (1, 2, 3, 6, 8, 10, 14)]
    assert seconds == pytest.approx([1.0, 1.1, 1.3, 1.9, 1.8, 1.7, 1.7])


def test_turns_of_a_run_that_measured_fewer_widths_still_count(tmp_path):
    turns = [[0, {"target": [1.0, 1.2]}], [1, {"widths": [1, 2, 5], "target": [3.0, 3.6, 6.0]}]]
    (tmp_path / "costs.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    log = CostLog(Slowing(), tmp_path / "costs.jsonl")
    assert log.typical.target == {1: 2.0, 2: pytest.approx(2.4), 5: 6.0}
    assert log.beside(1).target[1] == pytest.approx(3.0)


def test_a_short_run_is_measured_until_medians_mean_something():
    short, long = CostLog(Slowing(*[1.0] * 9)), CostLog(Slowing(*[1.0] * 9))
    short.measure(0)
    short.complete(1)
    assert list(short.turns) == [0, 1, 2, 3, 4]
    for number in range(6):
        long.measure(number)
    long.complete(6)
    assert list(long.turns) == [*range(7)]


@pytest.mark.parametrize(
    "name", ["", "model-", "plain-3", "stock-early-exit", "easd-x", "economize", "economize-lookup"]
)
def test_unknown_arms_are_refused(name):
    with pytest.raises(InvalidConfigError, match="known"):
        parse_arm(name)


def test_arms_mean_what_they_say():
    assert parse_arm("plain").is_plain
    assert parse_arm("model-7").config.length == 7
    assert parse_arm("easd-1.5").config.entropy_threshold == 1.5
    assert parse_arm("stock-assistant-5").stock == {"assistant_model": True, "num_assistant_tokens": 5}
    assert not parse_arm("ngram-4").needs_draft
    assert isinstance(parse_arm("self-draft").config, SelfDraftConfig)
    assert not parse_arm("self-draft").needs_draft
    assert parse_arm("tree").config.tree == "auto"
    assert parse_arm("tree-4").config.tree == TreeShape(4, total_nodes=4)
    assert parse_arm("tree-24").config.tree == TreeShape(total_nodes=24)
    for name in ("default", "model-7", "easd", "self-draft", "tree"):
        assert parse_arm(name).config.on_drafter_error == "raise"


def test_any_configuration_is_an_arm_under_a_name_of_its_own(tmp_path):
    config = NucleusConfig(nucleus_p=0.5, length=3)
    config.save_pretrained(tmp_path)
    arm = parse_arm(f"half={tmp_path}")
    assert (arm.name, arm.needs_draft) == ("half", True)
    assert arm.config == dataclasses.replace(config, on_drafter_error="raise")
    assert not parse_arm("own=self_draft").needs_draft
    SpeculativeConfig(drafting="ngram").save_pretrained(tmp_path)
    assert not parse_arm(f"lookup={tmp_path}").needs_draft
    for name in ("plain=easd", "model-3=easd", "my-reduced=easd", "two words=easd", "=easd"):
        with pytest.raises(InvalidConfigError, match="a name of its own"):
            parse_arm(name)
    with pytest.raises(InvalidConfigError, match="the arm mine cannot read its configuration"):
        parse_arm("mine=org/nothing-here")


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("model-3", {}, "needs the arm plain"),
        ("plain,model-3,model-3", {}, "each arm once, got model-3"),
        ("plain,model-3,own=easd", {"has_draft": False}, "model-3, own need a draft model"),
        ("plain,stock-lookup-3", {"batch_size": 2}, "one prompt at a time"),
    ],
)
def test_arms_that_cannot_run_together(names, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        check_arms([parse_arm(name) for name in names.split(",")], **{"has_draft": True, **options})


def test_what_was_not_priced_is_not_predicted():
    plain = row("plain", [1] * 4, 4.0)
    for source, unpriced in (("self", ()), ("tree", ()), ("model", ["other"])):
        figures = summarize([plain, row("other", [1] * 4, 2.0, [[3, 4, source]])], COSTS, unpriced=unpriced)["other"]
        assert figures["speedup"] == 2.0
        assert figures["predicted_speedup"] is figures["loop_efficiency"] is figures["ceiling_speedup"] is None
    assert parse_arm("model-3").is_priced
    assert not any(parse_arm(name).is_priced for name in ("self-draft", "tree", "plain"))


@pytest.mark.parametrize("kind", ["eagle", "eagle3-reduced"])
def test_a_drafter_network_is_a_step_of_one_token(kind):
    target = small_target()
    costs = measure_costs(target, drafter_for(target, kind), prefix_length=8, widest=2, repeats=1, batch_size=2)
    assert costs.draft_step is not None
    assert costs.draft_step > 0
    assert sorted(costs.target) == [1, 2]
