"""`specdec train exit-heads`."""

import pytest
import torch

from hf_specdec import ExitHeads, ExitHeadsConfig, SelfDraftConfig
from tests.toys import prompts


@pytest.fixture
def options(pair, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(f"w{row} w{row + 3} w{row + 1} w{row + 9} w{row + 2}" for row in range(12)))
    return ["train", "exit-heads", "--target", pair.target, "--data", file, "--exits", "1,2", "--dtype", "float32"]


@pytest.mark.parametrize("kind", ["linear", "linear+kl", "adapter"])
def test_it_writes_heads_that_draft(pair, options, run_json, run, tmp_path, kind):
    out = tmp_path / "heads"
    short = ["--max-tokens", 40, "--tokens-per-step", 12, "--save-every", 2, "--held-out", 0.3, "--kind", kind]
    found = run_json(*options, *short, "--out", out)
    assert found["exits"] == [1, 2]
    assert found["agreement"]["1"]["num_tokens"] > 0
    config = SelfDraftConfig(exit_heads=str(out), confidence_threshold=0.0, length=3, on_drafter_error="raise")
    asked = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    drafted = pair.model.generate(**prompts(), **asked, speculative_config=config, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == pair.model.generate(**prompts(), **asked).tolist()
    assert drafted.speculative_stats.num_draft_tokens > 0
    assert "--resume" in run(*options, *short, "--out", out, code=2).stderr
    again = run_json(*options, *short, "--out", out, "--resume")
    assert again["num_tokens"] == found["num_tokens"]
    assert all(bool(torch.isfinite(each).all()) for each in ExitHeads.from_pretrained(out).parameters())


def test_heads_are_fitted_further(options, run_json, run, tmp_path):
    short = ["--max-tokens", 40, "--tokens-per-step", 12, "--held-out", 0.3]
    first = run_json(*options, *short, "--kind", "linear", "--out", tmp_path / "first")
    start = ["--start", tmp_path / "first"]
    without_exits = [each for each in options if each not in ("--exits", "1,2")]
    more = run_json(*without_exits, *short, "--kind", "linear+kl", *start, "--out", tmp_path / "more")
    assert more["exits"] == [1, 2]
    assert more["num_tokens"] >= first["num_tokens"] + 40
    assert "leave --start away" in run(*options, "--kind", "linear", *start, "--out", tmp_path / "none", code=2).stderr


def test_options_before_the_subcommand_are_refused(options, run):
    assert (
        "--seed must stand after exit-heads"
        in run("train", "--seed", 3, *options[1:], "--kind", "linear", "--out", "x", code=2).stderr
    )


def test_train_says_what_it_needs(run):
    assert "--data, --recipe, --out" in run("train", "--target", "x", code=2).stderr


def test_a_vocabulary_that_is_not_there_is_missed_before_the_model_is_loaded(options, run, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_specdec.cli.models.load_models", None)
    more = ["--kind", "linear", "--out", tmp_path / "heads", "--vocabulary", tmp_path / "none"]
    assert "no draft vocabulary at" in run(*options, *more, code=2).stderr


def test_heads_are_named_on_the_command_line(pair, tmp_path, run, run_json):
    heads = ExitHeads(ExitHeadsConfig("linear", [1, 2], hidden_size=pair.model.config.hidden_size))
    heads.save_pretrained(tmp_path / "heads")
    options = ["--target", pair.target, "--assistant", tmp_path / "heads"]
    common = ["--prompt", "w1 w2 w3", "--max-new-tokens", 8]
    drafted = run_json("generate", *options, "--config", "self_draft", *common)
    plain = run_json("generate", "--target", pair.target, "--plain", *common)
    assert drafted["outputs"][0]["tokens"] == plain["outputs"][0]["tokens"]
    assert "exit_depths" in drafted["outputs"][0]["stats"]["events"]
    (tmp_path / "data.txt").write_text("w1\n")
    bench = ["bench", *options, "--data", tmp_path / "data.txt", "--out", tmp_path / "r"]
    assert "NAME=CONFIG" in " ".join(run(*bench, code=2).stderr.split())
    calibrate = ["calibrate", "easd", *options, "--data", tmp_path / "data.txt"]
    assert "is exit heads, and this command needs a causal LM" in " ".join(run(*calibrate, code=2).stderr.split())
