"""Running arms: what each measures, sampled runs, and peers that may not be installed."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from hf_specdec import InvalidConfigError, SelfDraftConfig
from hf_specdec.bench import Benchmark, Costs, divergences, economize, parse_arm, summarize
from hf_specdec.bench.report import markdown, report_paths
from tests.networks import drafter_for, small_target
from tests.toys import noisy_copy, prompts, state_of, tiny_llama


HAS_ECONOMIZE = importlib.util.find_spec("economize") is not None


class WordPieces:
    """Stands for a tokenizer where texts do not matter."""

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


def benchmark(*arms, prompts_=2, **options):
    target = tiny_llama()
    texts = prompts(prompts_, columns=8)["input_ids"].tolist()
    parsed = [parse_arm(name) for name in arms]
    return Benchmark(target, noisy_copy(target), WordPieces(), texts, parsed, **{"max_new_tokens": 12, **options})


STOCK = ("stock-assistant", "stock-assistant-3", "stock-lookup-3", "stock-early-exit-2")


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_every_arm_separates_the_prompt_from_decoding(temperature):
    bench = benchmark("plain", *STOCK, "default", "model-3", "ngram-3", temperature=temperature)
    before, generator = state_of(bench.assistant)[:2], torch.random.get_rng_state()
    for row in bench.run():
        assert len(row.tokens) == 12
        assert 0 < row.decode_seconds < row.total_seconds
        assert row.prefill_seconds > 0
        assert 1 <= row.decode_rounds <= row.decode_tokens <= 11
        if row.arm == "plain":
            assert row.decode_rounds == row.decode_tokens == 11
        elif row.stats:
            assert row.decode_rounds == len(row.rounds) == row.stats["num_rounds"]
    assert torch.equal(generator, torch.random.get_rng_state())
    assert state_of(bench.assistant)[:2] == before


def test_greedy_arms_write_the_same_text():
    bench = benchmark("plain", *STOCK, "default", "model-3")
    texts = {(row.arm, row.prompt): row.tokens for row in bench.run()}
    assert all(tokens == texts["plain", prompt] for (_, prompt), tokens in texts.items())


def test_sampled_texts_depend_on_seed_and_prompt_alone():
    def texts(*arms, **options):
        return {(row.arm, row.prompt): row.tokens for row in benchmark(*arms, temperature=1.0, **options).run()}

    first = texts("plain", "model-2")
    assert texts("plain", "ngram-2", "model-2", prompts_=3).items() >= first.items()
    other = texts("plain", "model-2", seed=5)
    assert all(other[key] != first[key] for key in first)


def test_a_prompt_that_lacks_an_arm_is_decoded_anew_by_all(tmp_path, monkeypatch):
    """Times of two processes do not compare."""
    arms, file = ("plain", "model-3", "ngram-3"), tmp_path / "rows.jsonl"
    whole = benchmark(*arms, prompts_=3, checkpoint=file).run()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))  # of the second prompt one arm is missing
    decoded, decode = [], Benchmark.decode
    monkeypatch.setattr(Benchmark, "decode", lambda *asked: decoded.append(asked[1:]) or decode(*asked))
    costs = SimpleNamespace(calls=[], complete=lambda num_prompts: None)
    costs.forget, costs.measure = (lambda n, name=name: costs.calls.append((name, n)) for name in ("forget", "measure"))
    again = benchmark(*arms, prompts_=3, checkpoint=file, costs=costs).run()
    assert sorted((prompt, arm.name) for arm, prompt in decoded) == [
        (prompt, arm) for prompt in (1, 2) for arm in sorted(arms)
    ]
    assert [(row.arm, row.prompt, row.tokens) for row in again] == [(row.arm, row.prompt, row.tokens) for row in whole]
    assert [row.decode_seconds for row in again if row.prompt == 0] == [
        row.decode_seconds for row in whole if row.prompt == 0
    ]
    assert len(file.read_text().splitlines()) == 9
    assert [call for call in costs.calls if call[0] == "forget"] == [("forget", 1), ("forget", 2)]


def ragged(*arms, **options):
    """Five prompts of different lengths, three of them at once."""
    bench = benchmark(*arms, prompts_=5, batch_size=3, **options)
    bench.prompts = [each[: 3 + place] for place, each in enumerate(bench.prompts)]
    bench.__post_init__()
    return bench


def test_batches_write_what_each_prompt_writes_alone():
    batches = ragged("plain", "model-3", "default").run()
    assert [(row.prompt, row.arm, len(row.batch)) for row in batches] == [
        (prompt, arm, size) for prompt, size in ((0, 3), (1, 2)) for arm in ("default", "model-3", "plain")
    ]
    alone = ragged("plain")
    alone.batch_size = 1
    alone.__post_init__()
    texts = [row.tokens for row in alone.run()]
    for row in batches:
        assert row.batch == texts[3 * row.prompt :][:3]
        assert row.tokens == [token for tokens in row.batch for token in tokens]
        assert row.decode_tokens == len(row.tokens) - len(row.batch)


def test_a_batch_pays_for_its_longest_draft_and_its_rows_have_their_own_rounds():
    bench = ragged("plain", "model-3")
    for row in (each for each in bench.run() if each.arm == "model-3"):
        assert len(row.row_rounds) == len(row.batch)
        for tokens, rounds in zip(row.batch, row.row_rounds, strict=True):
            assert sum(emitted for _, emitted, *_ in rounds) == len(tokens) - 1
        assert len(row.rounds) == row.decode_rounds == max(map(len, row.row_rounds))
        for number, (drafted, emitted, *_) in enumerate(row.rounds):
            going = [rounds[number] for rounds in row.row_rounds if number < len(rounds)]
            assert drafted == max(each[0] for each in going)
            assert emitted == sum(each[1] for each in going)


def test_figures_of_batches():
    bench = ragged("plain", "model-3", "ngram-2")
    rows = bench.run()
    costs = Costs({1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013}, 0.002, 8, batch_size=3)
    figures = summarize(rows, costs)
    assert all(each["num_prompts"] == 5 for each in figures.values())
    assert all(each["text_equal"] == 1.0 for each in figures.values())
    assert all(each["best_constant"] is None for each in figures.values())
    ours = [row for row in rows if row.arm == "model-3"]
    row_rounds = sum(row.stats["num_rounds"] for row in ours)
    assert figures["model-3"]["tokens_per_round"] == sum(row.decode_tokens for row in ours) / row_rounds
    assert figures["model-3"]["oracle_speedup"] >= figures["model-3"]["predicted_speedup"] > 0


def test_an_end_in_a_batch_cuts_the_row_and_nothing_else():
    free = {row.prompt: row.batch for row in ragged("plain").run()}
    bench = ragged("plain", "model-3")
    end = free[0][0][4]
    bench.target.generation_config.eos_token_id = end
    for row in bench.run():
        for tokens, whole in zip(row.batch, free[row.prompt], strict=True):
            assert tokens == (whole[: whole.index(end) + 1] if end in whole else whole)


@pytest.mark.parametrize("arm", STOCK)
def test_what_takes_one_prompt_is_refused_in_batches(arm):
    with pytest.raises(InvalidConfigError, match=f"{arm} decode one prompt at a time"):
        benchmark("plain", arm, batch_size=2)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature):
    with pytest.raises(InvalidConfigError, match="above 0"):
        benchmark("plain", temperature=temperature)


def test_without_economize_its_arms_say_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfigError, match=r"economize-lookup-3 cannot run: .* pip install economize"):
        benchmark("plain", "economize-lookup-3")


class FakeModel:
    """Emits 5, 6, 7, ... as economize reports it: the stop condition is asked after each token, cycle by cycle."""

    cycles = ((3, 2), (3, 0), (3, 3))

    def decode(self, input_ids, max_new_tokens, selector=None, stop=None):
        assert selector is None
        tokens = []
        for count in (1, *(accepted + 1 for _, accepted in self.cycles)):
            for _ in range(count):
                tokens.append(5 + len(tokens))
                if stop(torch.tensor(tokens)) or len(tokens) == max_new_tokens:
                    break
        kinds = ["exact", *["draft", "draft", "exact"] * len(self.cycles)]
        cost = SimpleNamespace(events=[SimpleNamespace(kind=kind) for kind in kinds])
        return SimpleNamespace(tokens=torch.tensor(tokens), acceptance=list(self.cycles), cost=cost)


@pytest.mark.parametrize(("has_draft_model", "phase"), [(False, (8, 3)), (True, (5, 2))])
def test_economizes_decode_phase_begins_after_the_prompts(has_draft_model, phase):
    """The first token is the prompt's own; with a draft model the first cycle reads the prompt once more."""
    run = object.__new__(economize.EconomizeRun)
    run._model, run._eos, run._temperature, run._has_draft_model = FakeModel(), {99}, None, has_draft_model
    tokens, num_tokens, cycles, seconds = run.decode(torch.tensor([[1]]), 9)
    assert tokens == list(range(5, 14))
    assert (num_tokens, cycles) == phase
    assert seconds > 0


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # economize writes for 5.0 on
@pytest.mark.skipif(not HAS_ECONOMIZE, reason="economize is not installed")
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_economize_decodes_the_same_prompts(tmp_path, temperature):
    bench = benchmark("plain", "economize-lookup-3", "economize-model-3", temperature=temperature)
    bench.assistant.save_pretrained(tmp_path)
    bench.assistant.config.name_or_path = str(tmp_path)
    before = state_of(bench.target)[:2]
    rows = bench.run()
    plain = {row.prompt: row.tokens for row in rows if row.arm == "plain"}
    for row in rows:
        assert len(row.tokens) == 12
        assert 0 < row.decode_seconds < row.total_seconds
        assert 1 <= row.decode_rounds <= row.decode_tokens <= 11
        assert temperature is not None or row.tokens == plain[row.prompt]
    assert state_of(bench.target)[:2] == before


def test_self_drafts_trees_and_saved_configurations_are_arms(tmp_path):
    target = small_target()
    texts = prompts(2, columns=8)["input_ids"].tolist()
    SelfDraftConfig(exit_layers=[2, 4], confidence_threshold=0.0, length=2).save_pretrained(tmp_path)
    arms = [parse_arm(name) for name in ("plain", "self-draft", f"exits={tmp_path}", "tree-4", "model-2")]
    bench = Benchmark(target, drafter_for(target, "eagle"), WordPieces(), texts, arms, max_new_tokens=12)
    rows = bench.run()
    costs = Costs({1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013}, 0.002, 8)
    figures = summarize(rows, costs, unpriced=[arm.name for arm in arms if not arm.is_priced])
    assert all(each["text_equal"] == 1.0 for each in figures.values())
    assert sum(row.stats["num_draft_tokens"] for row in rows if row.arm in ("exits", "tree-4")) > 0
    assert {name for name, each in figures.items() if each["predicted_speedup"] is not None} == {"model-2"}


def test_a_causal_lm_drafts_no_trees():
    with pytest.raises(InvalidConfigError, match="tree-4 draft trees, which needs a drafter network"):
        benchmark("plain", "tree-4")


def test_texts_that_part_are_found_and_rounding_is_told_from_faults():
    bench = benchmark("plain", "model-3", "easd")
    rows = bench.run()
    assert divergences(bench, [row for row in rows if row.arm != "easd"]) == {}
    ours = next(row for row in rows if (row.arm, row.prompt) == ("model-3", 1))
    ours.tokens[5] = (ours.tokens[5] + 1) % 64
    [parted] = divergences(bench, rows)["model-3"]
    assert (parted["prompt"], parted["position"], parted["kind"]) == (1, 5, "fault")
    logits = bench.target(torch.tensor([bench.prompts[1] + ours.tokens[:5]])).logits[0, -1].detach()
    assert parted["gap"] == pytest.approx(float(logits.topk(2).values.diff().abs()), abs=1e-4)
    assert "prompt 1 at new token 5, fault (top-2 gap" in markdown(
        {"tasks": {"model-3": {"divergences": [parted]}}}, {}
    )
    del ours.tokens[5:]
    [ended] = divergences(bench, rows)["model-3"]
    assert (ended["position"], ended["gap"]) == (5, None)


def test_batches_are_compared_row_by_row():
    bench = ragged("plain", "model-3")
    rows = bench.run()
    assert divergences(bench, rows) == {}
    ours = next(row for row in rows if (row.arm, row.prompt) == ("model-3", 1))
    ours.batch[1][2] = (ours.batch[1][2] + 1) % 64
    assert [(each["prompt"], each["position"]) for each in divergences(bench, rows)["model-3"]] == [(4, 2)]


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("results", ["results.json", "results.md", "results.png"]),
        ("qwen1.5", ["qwen1.5.json", "qwen1.5.md", "qwen1.5.png"]),
        ("results.json", ["results.json", "results.md", "results.png"]),
    ],
)
def test_a_dot_in_a_name_is_part_of_it(prefix, names, tmp_path):
    assert report_paths(tmp_path / prefix) == [tmp_path / name for name in names]
