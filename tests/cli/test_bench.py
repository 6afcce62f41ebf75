"""`specdec bench`: its three outputs, resuming, and equal texts."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import hf_specdec.loop
from hf_specdec import DraftVocabulary, EASDConfig
from hf_specdec.hub.results import check_drafter
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.target import weights_fingerprint
from tests.networks import drafter_for


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "tasks.jsonl"
    rows = [{"question": f"w{i} w{2 * i + 1} w{3 * i + 2} w7 w{i} w{2 * i + 1}"} for i in range(1, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options_for(pair, data, out, *more):
    return ["bench", *pair.options, "--data", data, "--max-new-tokens", "12", "--out", out, *more]


def test_the_outputs_agree_and_exact_texts_are_plain(pair, data, tmp_path, run_json):
    arms = "plain,stock-assistant-3,stock-lookup-3,default,model-3,ngram,easd"
    printed = run_json(*options_for(pair, data, tmp_path / "r" / "result", "--arms", arms))
    saved = json.loads((tmp_path / "r" / "result.json").read_text())
    assert saved["summary"] == printed["summary"]
    figures = saved["summary"]["tasks"]
    assert list(figures) == ["plain", "default", "easd", "model-3", "ngram", "stock-assistant-3", "stock-lookup-3"]
    assert all(figures[name]["text_equal"] == 1.0 for name in figures if name != "easd")
    assert figures["plain"]["speedup"] == 1.0
    assert figures["model-3"]["tokens_per_round"] > 1.0
    assert figures["model-3"]["lossless"]
    assert not figures["easd"]["lossless"]
    named = {"tokens_per_second", "speedup", "predicted_speedup", "loop_efficiency", "tokens_per_round", "lossless",
             "text_equal", "ceiling_speedup", "oracle_speedup", "best_constant", "prefill_seconds"}  # fmt: skip
    assert all(named <= set(each) for each in figures.values())
    assert figures["model-3"]["oracle_speedup"] >= figures["model-3"]["predicted_speedup"] > 0
    assert figures["model-3"]["best_constant"]["length"] in range(4)
    assert figures["plain"]["tokens_per_round"] == 1.0 < figures["stock-assistant-3"]["tokens_per_round"]
    assert figures["stock-assistant-3"]["predicted_speedup"] is None
    assert (tmp_path / "r" / "result.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "r" / "result.md").read_text()
    assert "| stock-lookup-3 |" in table
    assert "- predicted from: passes over 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17 tokens; straight lines between" in table
    assert "`model-3`: best constant length in hindsight" in table
    assert str(tmp_path) not in table + json.dumps(saved["environment"])


def test_round_counts_match_the_tokens(pair, data, tmp_path, run_json):
    run_json(*options_for(pair, data, tmp_path / "result", "--arms", "plain,model-3", "--limit", "2"))
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    ours = [row for row in rows if row["arm"] == "model-3"]
    assert len(rows) == 4
    for row in ours:
        assert sum(emitted for _, emitted, *_ in row["rounds"]) == len(row["tokens"]) - 1 == row["decode_tokens"]


def test_a_killed_run_resumes_to_the_same_texts_and_counts(pair, data, tmp_path, run_json):
    arms = ["--arms", "plain,model-3,ngram-3"]
    run_json(*options_for(pair, data, tmp_path / "whole", *arms))
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "hf_specdec.cli", *map(str, options_for(pair, data, out, *arms))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    rows = tmp_path / "killed.tasks.rows.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not rows.exists() or rows.read_text().count("\n") < 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= rows.read_text().count("\n") <= 12
    rows.write_text(rows.read_text() + '{"arm": "plain", "pro')  # cut off in the middle of a line
    run_json(*options_for(pair, data, out, "--resume", *arms))

    def texts(name):
        return [
            (row["arm"], row["prompt"], row["tokens"], row["rounds"])
            for row in json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        ]

    assert texts("killed") == texts("whole")


def test_costs_are_measured_beside_every_prompt_once(pair, data, tmp_path, run_json):
    """Those of an interrupted run are gone on with, those of another run are forgotten, also of data that was not reached."""
    command = options_for(pair, data, tmp_path / "r", "--arms", "plain,ngram-2")
    run_json(*command)
    file = tmp_path / "r.tasks.costs.jsonl"
    first = file.read_text().splitlines()
    assert [json.loads(line)[0] for line in first] == [0, 1, 2, 3, 4]
    file.write_text("\n".join(first[:3]) + "\n")
    run_json(*command, "--resume")
    again = file.read_text().splitlines()
    assert (len(again), again[:3]) == (5, first[:3])
    run_json(*command)
    assert not set(first) & set(file.read_text().splitlines())


def test_a_batched_run_is_measured_resumed_and_reported(pair, data, tmp_path, run, run_json):
    options = options_for(pair, data, tmp_path / "r", "--arms", "plain,model-3", "--batch-size", "3")
    first = run_json(*options)
    figures = first["summary"]["tasks"]["model-3"]
    assert first["environment"]["batch_size"] == first["environment"]["costs"]["batch_size"] == 3
    assert figures["text_equal"] == 1.0
    assert figures["num_prompts"] == 4
    assert figures["oracle_speedup"] >= figures["predicted_speedup"] > 0
    again = run_json(*options, "--resume")
    assert again["summary"]["tasks"]["model-3"]["tokens_per_second"] == figures["tokens_per_second"]
    error = run(*options_for(pair, data, tmp_path / "s", "--arms", "plain,stock-lookup-3", "--batch-size", "2"), code=2)
    assert "one prompt at a time" in " ".join(error.stderr.split())


def test_resuming_another_run_is_refused(pair, data, tmp_path, run):
    run(*options_for(pair, data, tmp_path / "result", "--arms", "plain,ngram", "--limit", "1"))
    again = options_for(pair, data, tmp_path / "result", "--arms", "plain,model-2", "--limit", "1", "--resume")
    assert "other arms" in run(*again, code=2).stderr
    for option in (["--temperature", "0.5"], ["--seed", "3"], ["--no-chat"], ["--no-packed"]):
        again = options_for(
            pair, data, tmp_path / "result", "--arms", "plain,ngram", "--limit", "1", "--resume", *option
        )
        name = option[0].removeprefix("--").removeprefix("no-")
        assert f"a run with other {name}: run without --resume" in run(*again, code=2).stderr


def test_a_sampled_run_is_repeatable_and_resumes(pair, data, tmp_path, run_json):
    arms = ["--arms", "plain,stock-assistant-3,model-3", "--temperature", "0.8", "--limit", "2"]

    def texts(name, *more):
        printed = run_json(*options_for(pair, data, tmp_path / name, *arms, *more))
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        return printed, [(row["arm"], row["prompt"], row["tokens"]) for row in saved["rows"]]

    printed, first = texts("first", "--seed", "1")
    assert printed["environment"]["decoding"].startswith("sampled at temperature 0.8, seed 1, 12 new tokens")
    assert printed["summary"]["tasks"]["model-3"]["text_equal"] is None
    assert printed["summary"]["tasks"]["model-3"]["lossless"]
    assert texts("again", "--seed", "1")[1] == first
    assert texts("other", "--seed", "2")[1] != first
    rows = tmp_path / "first.tasks.rows.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    assert texts("first", "--seed", "1", "--resume")[1] == first


@pytest.mark.parametrize(
    ("arms", "message"),
    [("model-3", "plain"), ("plain,nonsense", "known"), ("plain,stock-lookup", "known"), ("plain,economize", "known")],
)
def test_wrong_arms_are_explained(pair, data, tmp_path, run, arms, message):
    assert message in run(*options_for(pair, data, tmp_path / "result", "--arms", arms), code=2).stderr


def test_an_arm_that_drafts_needs_a_draft_model(pair, data, tmp_path, run):
    command = ["bench", "--target", pair.target, "--data", data, "--out", tmp_path / "r", "--arms", "plain,model-3"]
    assert "need a draft model" in run(*command, code=2).stderr


def test_reduced_arms_use_the_vocabulary_and_its_own_costs(pair, data, tmp_path, run, run_json):
    vocabulary = DraftVocabulary.from_texts(pair.tokenizer, ["w1 w2 w3 w4 w5 w6 w7 w8"] * 2, 20)
    vocabulary.save(tmp_path / "words.safetensors")
    arms = ["--arms", "plain,model-3,model-reduced-3,default-reduced", "--limit", "2"]
    command = options_for(pair, data, tmp_path / "r", *arms)
    assert "--draft-vocabulary" in run(*command, code=2).stderr
    printed = run_json(*command, "--draft-vocabulary", tmp_path / "words.safetensors")
    assert printed["environment"]["costs"]["reduced_step"] > 0
    assert printed["environment"]["draft_vocabulary"].startswith("words.safetensors, ")
    figures = printed["summary"]["tasks"]
    assert {name: each["text_equal"] for name, each in figures.items()} == dict.fromkeys(figures, 1.0)
    assert list(figures) == ["plain", "default-reduced", "model-3", "model-reduced-3"]
    assert figures["model-reduced-3"]["predicted_speedup"] > 0


def test_a_drafter_network_is_measured_with_a_cost_of_its_own(pair, data, tmp_path, run, run_json):
    drafter_for(pair.model, "eagle").save_pretrained(tmp_path / "eagle")
    command = ["bench", "--target", pair.target, "--assistant", tmp_path / "eagle", "--data", data, "--limit", "2"]
    command += ["--max-new-tokens", "8", "--out", tmp_path / "r"]
    assert "need a causal LM as draft model, got the drafter network EagleDrafter" in " ".join(
        run(*command, code=2).stderr.split()
    )
    printed = run_json(*command, "--arms", "plain,model-2", "--no-rows")
    figures = printed["summary"]["tasks"]["model-2"]
    assert printed["environment"]["assistant"] == "eagle"
    network = AutoDrafter.from_pretrained(tmp_path / "eagle", target=pair.model)
    assert printed["environment"]["drafter_weights"] == weights_fingerprint(network)
    check_drafter(tmp_path / "eagle", printed)
    assert printed["environment"]["costs"]["draft_step"] > 0
    assert figures["text_equal"] == 1.0
    assert figures["predicted_speedup"] > 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved == {**printed, "rows": []}


def test_a_command_that_needs_a_causal_lm_says_so(pair, data, tmp_path, run):
    drafter_for(pair.model, "eagle").save_pretrained(tmp_path / "eagle")
    command = ["calibrate", "easd", "--target", pair.target, "--draft", tmp_path / "eagle", "--data", data]
    command += ["--prompt-field", "question", "--field", "question"]
    assert "is a drafter network, and this command needs a causal LM" in " ".join(run(*command, code=2).stderr.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "plain,nonsense"], "known"),
        (["--arms", "model-3"], "needs the arm plain"),
        (["--arms", "plain,model-reduced-3", "--draft-vocabulary", "missing"], "no draft vocabulary"),
        (["--arms", "plain,stock-lookup-3", "--batch-size", "2"], "one prompt at a time"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--field", "nothing"], "no text in the field 'nothing'"),
        (["--arms", "plain,mine=nowhere/at-all"], "the arm mine cannot read its configuration"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(pair, data, tmp_path, run, monkeypatch, more, message):
    monkeypatch.setattr("hf_specdec.cli.bench.load_models", None)
    command = options_for(pair, data, tmp_path / "r", *more)
    assert message in " ".join(run(*command, code=2).stderr.split())


def test_two_data_sets_of_one_name_are_refused(pair, data, tmp_path, run, monkeypatch):
    monkeypatch.setattr("hf_specdec.cli.bench.load_models", None)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(data.read_text())
    command = options_for(pair, tmp_path / "train.jsonl", tmp_path / "r", "--data", tmp_path / "test.jsonl")
    assert f"would both be called {tmp_path.name.lower()}" in " ".join(run(*command, code=2).stderr.split())


def test_resuming_with_other_models_prompts_or_configs_is_refused(pair, data, tmp_path, run, monkeypatch):
    EASDConfig(top_n=3).save_pretrained(tmp_path / "config")
    arms = ["--arms", f"plain,mine={tmp_path / 'config'}", "--limit", "1", "--resume"]
    command = options_for(pair, data, tmp_path / "result", *arms)
    run(*command)
    monkeypatch.setattr("hf_specdec.cli.bench.load_models", None)

    def refused(*options):
        return " ".join(run(*options, code=2).stderr.split())

    assert "other quantization" in refused(*command, "--quantization", "8bit")
    shutil.copytree(pair.draft, tmp_path / "draft")  # another folder of the same name
    swapped = [tmp_path / "draft" if each == pair.draft else each for each in command]
    assert "other models" in refused(*swapped)
    EASDConfig(top_n=4).save_pretrained(tmp_path / "config")
    assert "other configs" in refused(*command)
    EASDConfig(top_n=3).save_pretrained(tmp_path / "config")
    data.write_text('{"question": "w9 w8 w7"}\n')
    assert "other prompts" in refused(*command)


def test_a_dotted_output_keeps_its_name(pair, data, tmp_path, run_json):
    printed = run_json(*options_for(pair, data, tmp_path / "pair-1.5", "--arms", "plain,ngram-2", "--limit", "1"))
    assert {path.name for path in tmp_path.glob("pair-1.5.*")} == {
        "pair-1.5.json", "pair-1.5.md", "pair-1.5.png", "pair-1.5.tasks.costs.jsonl", "pair-1.5.tasks.rows.jsonl",
        "pair-1.5.tasks.rows.settings.json",
    }  # fmt: skip
    assert printed["environment"]["baseline"] == "eager"  # layers as small as these stay as they are
    assert printed["environment"]["dtype"] == "float32"


def test_a_text_that_should_be_plain_decodings_and_is_not_ends_in_exit_code_1(pair, data, tmp_path, run, monkeypatch):
    def faulty(*arguments):
        verdict = verify(*arguments)
        return dataclasses.replace(verdict, next_tokens=(verdict.next_tokens + 1) % 64)

    verify = hf_specdec.loop.verify
    monkeypatch.setattr(hf_specdec.loop, "verify", faulty)
    command = options_for(pair, data, tmp_path / "r", "--arms", "plain,stock-lookup-3,model-3", "--limit", "2")
    assert "although exact: model-3 on tasks" in " ".join(run(*command, code=1).stderr.split())
    figures = json.loads((tmp_path / "r.json").read_text())["summary"]["tasks"]
    assert {each["kind"] for each in figures["model-3"]["divergences"]} == {"fault"}
    assert "divergences" not in figures["stock-lookup-3"]
    assert "texts that part from plain decoding's: prompt 0 at new token" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize("content", ["{broken", "[1, 2]"])
def test_a_first_line_that_is_no_object_is_explained(pair, data, tmp_path, run, content):
    data.write_text(content + "\n")
    assert "tasks.jsonl, line 1" in run(*options_for(pair, data, tmp_path / "r"), code=2).stderr
