"""Replays, ceilings and oracles: by hand, and the oracle against every schedule there is."""

import itertools
from dataclasses import replace

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.bench import Arm, Benchmark, Costs, Row, parse_arm, summarize
from hf_specdec.bench.replay import best_constant, oracle_seconds, replay_seconds, sources_of
from tests.bench.test_runner import WordPieces
from tests.toys import noisy_copy, prompts, tiny_llama


COSTS = Costs({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.4}, draft_step=0.25, prefix_length=8)


def row(*rounds, tokens=None, arm="model", prompt=0, accepted=(1,)):
    count = sum(emitted for _, emitted, *_ in rounds)
    recorded = [
        [drafted, emitted, source, *(rest or [[[source, drafted]] if drafted else []])]
        for drafted, emitted, source, *rest in rounds
    ]
    tokens = list(range(count + 1)) if tokens is None else tokens
    stats = {
        "num_verified_tokens": 1, "num_accepted_tokens": 1, "accepted_at_position": list(accepted), "lossless": True,
        "events": {},
    }  # fmt: skip
    return Row(arm, prompt, tokens, "", count, count * 0.8, count, recorded, stats, len(rounds))


def test_a_replay_sums_isolated_costs():
    recorded = row((3, 2, "model"), (2, 3, "ngram"), (0, 1, "none"))
    assert replay_seconds([recorded], COSTS) == pytest.approx(3 * 0.25 + 1.4 + 1.2 + 1.0)
    assert sources_of([recorded]) == {"model", "ngram"}
    extended = row((3, 4, "hybrid", [["model", 1], ["ngram", 2]]))
    assert replay_seconds([extended], COSTS) == pytest.approx(0.25 + 1.4)
    assert sources_of([extended]) == {"model", "ngram"}


def test_a_batch_waits_for_its_slowest_row():
    quick, slow = row((3, 4, "model"), (0, 1, "none")), row(*[(0, 1, "none")] * 5, tokens=[9] * 6)
    alone = [oracle_seconds(each, [each], {"model"}, COSTS) for each in (quick, slow)]
    assert alone == pytest.approx([3 * 0.25 + 1.4 + 1.0, 5.0])
    both = replace(quick, batch=[quick.tokens, slow.tokens], row_rounds=[quick.rounds, slow.rounds])
    assert oracle_seconds(both, [both], {"model"}, COSTS) == max(alone)


def test_constant_lengths_by_hand():
    """Judged: 3 of 3 first drafts accepted, 1 of 3 second ones, and 1 of 1 third one."""
    rounds = (3, 4, "model"), (3, 2, "model"), (2, 2, "model"), (1, 1, "model")
    found = best_constant([row(*rounds)], COSTS, plain_seconds=1.0)
    expected = {1: 2.0, 2: 2.0 + 1 / 3, 3: 2.0 + 2 / 3}
    for length, tokens in expected.items():
        # In a text's last round a draft may be cut off, which judges nothing.
        seconds = length * 0.25 + COSTS.pass_seconds(length + 1)
        assert found["by_length"][length] == pytest.approx(tokens / seconds)
    assert found["by_length"][0] == 1.0
    assert found["length"] == max(found["by_length"], key=found["by_length"].get)


def test_sources_are_weighed_and_rounds_without_a_draft_stay_plain():
    rounds = (1, 2, "model"), (1, 1, "model"), (2, 3, "ngram"), (0, 1, "none"), (0, 1, "none")
    found = best_constant([row(*rounds)], COSTS, plain_seconds=2.0)
    tokens = 2 + 2 * 1.5 + 1 * 3.0  # positions of the model's second draft were never judged, and count as wrong
    seconds = 2 * 1.0 + 2 * (2 * 0.25 + 1.2) + 1 * 1.2
    assert found["by_length"][2] == pytest.approx(2.0 * tokens / seconds)
    assert set(found["by_length"]) == {0, 1, 2}


def test_a_constant_arm_finds_its_own_prediction():
    """Where every draft is right, the constant length that was run is predicted as it was replayed."""
    recorded = row(*[(3, 4, "model")] * 5)
    assert best_constant([recorded], COSTS, 1.0)["by_length"][3] == pytest.approx(
        20 / replay_seconds([recorded], COSTS)
    )


def every_schedule(length, reach, costs):
    """Seconds of the fastest of all ways to cut a text into rounds and to choose what drafts for each."""
    fastest = float("inf")
    for cuts in itertools.product([False, True], repeat=length - 1):
        ends = [place + 1 for place, cut in enumerate(cuts) if cut] + [length]
        seconds, start = 0.0, 0
        for end in ends:
            drafted = end - start - 1
            ways = [costs.pass_seconds(1)] if drafted == 0 else []
            for source, right in reach.items():
                step = costs.draft_step if source == "model" else 0.0
                # The last token of a text may be a draft itself.
                for count in {drafted, drafted + (end == length)} - {0}:
                    if right[start] >= count:
                        ways.append(count * step + costs.pass_seconds(count + 1))
                    # A match may go on where the model stops.
                    more = reach.get("ngram", [0] * 9)
                    ways += [
                        own * step + costs.pass_seconds(count + 1)
                        for own in range(1, count)
                        if source == "model" and right[start] >= own and more[start + own] >= count - own
                    ]
            seconds += min(ways, default=float("inf"))
            start = end
        fastest = min(fastest, seconds)
    return fastest


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_the_best_of_all_schedules(seed):
    generator = torch.Generator().manual_seed(seed)

    def random_row(source, arm):
        rounds, left = [], 8
        while left:
            emitted = min(left, int(torch.randint(1, 5, (1,), generator=generator)))
            drafted = emitted - 1 + int(torch.randint(0, 2, (1,), generator=generator))
            rounds.append((drafted, emitted, source if drafted else "none"))
            left -= emitted
        return row(*rounds, arm=arm)

    rows = [random_row("model", "model"), random_row("ngram", "ngram")]
    reach = {}
    for each, source in zip(rows, ("model", "ngram"), strict=True):
        reach[source], place = [0] * 9, 0
        for drafted, emitted, *_ in each.rounds:
            right = min(drafted, emitted - 1)
            for ahead in range(right):
                reach[source][place + ahead] = right - ahead
            place += emitted
    both = oracle_seconds(rows[0], rows, {"model", "ngram"}, COSTS)
    assert both == pytest.approx(every_schedule(8, reach, COSTS))
    alone = oracle_seconds(rows[0], rows, {"model"}, COSTS)
    assert alone == pytest.approx(every_schedule(8, {"model": reach["model"]}, COSTS))
    assert both <= alone <= replay_seconds(rows[:1], COSTS)


def test_the_parts_of_an_extended_draft_teach_apart():
    extended = row((3, 4, "hybrid", [["model", 1], ["ngram", 2]]), (0, 1, "none"))
    assert oracle_seconds(extended, [extended], {"model", "ngram"}, COSTS) == pytest.approx(0.25 + 1.4 + 1.0)
    assert oracle_seconds(extended, [extended], {"model"}, COSTS) == pytest.approx(0.25 + 1.1 + 3.0)
    half = row((3, 2, "hybrid", [["model", 2], ["ngram", 1]]), (0, 1, "none"))
    assert oracle_seconds(half, [half], {"model", "ngram"}, COSTS) == pytest.approx(0.25 + 1.1 + 1.0)


def test_rounds_of_other_texts_and_prompts_teach_nothing():
    own = row((1, 1, "model"), (0, 1, "none"), (0, 1, "none"))
    right = row((2, 3, "model"))
    assert oracle_seconds(own, [own], {"model"}, COSTS) == pytest.approx(3.0)
    assert oracle_seconds(own, [own, right], {"model"}, COSTS) == pytest.approx(0.5 + 1.2)
    for other in (row((2, 3, "model"), tokens=[9, 9, 9, 9]), row((2, 3, "model"), prompt=1)):
        assert oracle_seconds(own, [own, other], {"model"}, COSTS) == pytest.approx(3.0)


def test_a_pass_may_run_wider_where_that_is_cheaper():
    noisy = Costs({1: 1.0, 2: 1.5, 3: 1.2}, draft_step=0.0, prefix_length=8)
    assert oracle_seconds(row((1, 2, "ngram")), [row((1, 2, "ngram"))], {"ngram"}, noisy) == pytest.approx(1.2)


def test_real_runs_stand_in_order():
    """A run predicts no more than its ceiling, and a hybrid's ceiling is no lower than those of its parts."""
    target = tiny_llama()
    draft, texts = noisy_copy(target), prompts(3, columns=9)["input_ids"].tolist()
    arms = [parse_arm("plain"), parse_arm("model-3"), parse_arm("ngram-3")]
    arms.append(Arm("mix", SpeculativeConfig(drafting="hybrid", length=3, on_drafter_error="raise"), needs_draft=True))
    rows = Benchmark(target, draft, WordPieces(), texts, arms, max_new_tokens=24).run()
    figures = summarize(rows, COSTS)
    for name in ("model-3", "ngram-3", "mix"):
        assert figures[name]["oracle_speedup"] >= figures[name]["predicted_speedup"]
        assert figures[name]["ceiling_speedup"] >= figures[name]["predicted_speedup"] > 0
        assert figures[name]["text_equal"] == 1.0
        assert figures[name]["best_constant"]["speedup"] > 0
    for figure in ("ceiling_speedup", "oracle_speedup"):
        parts = figures["model-3"][figure], figures["ngram-3"][figure]
        assert figures["mix"][figure] >= max(parts) - 1e-9


def test_a_ceiling_is_the_best_exact_arm_of_the_same_drafters():
    rows = [
        row(*[(0, 1, "none")] * 8, arm="plain"),
        row((3, 4, "model"), (3, 4, "model"), arm="good"),
        row(*[(1, 2, "model")] * 4, arm="weak"),
        row((7, 8, "model"), arm="easd"),
        row(*[(1, 2, "ngram")] * 4, arm="lookup"),
        row((3, 4, "model"), (1, 2, "ngram"), (1, 2, "ngram"), arm="mix"),
        row(*[(3, 4, "model")] * 2, arm="good-reduced"),
    ]
    rows[0].stats.clear()
    rows[3].stats["lossless"] = False
    figures = summarize(rows, replace(COSTS, reduced_step=0.01))
    ceilings = {name: each["ceiling_speedup"] for name, each in figures.items()}
    predicted = {name: each["predicted_speedup"] for name, each in figures.items()}
    assert ceilings["plain"] is None
    assert ceilings["good"] == ceilings["weak"] == predicted["good"] > predicted["weak"]
    assert ceilings["easd"] == predicted["easd"] > predicted["good"]
    assert ceilings["lookup"] == predicted["lookup"] < predicted["mix"] < ceilings["mix"]
    assert predicted["good-reduced"] == ceilings["good-reduced"] > ceilings["good"]
