"""`specdec calibrate easd`: thresholds shown, printed as JSON, and saved."""

import json

import pytest

from hf_specdec import EASDConfig
from hf_specdec.acceptance import pair_fingerprint
from hf_specdec.calibration import calibrate_easd


@pytest.fixture
def data(tmp_path):
    texts = [" ".join(f"w{(7 * row + 3 * place) % 59}" for place in range(12)) for row in range(4)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    rows = [json.dumps({"text": text, "ask": "w1 w2 w3"}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    return tmp_path, texts


def test_it_prints_and_saves_what_the_function_finds(run, run_json, pair, data):
    folder, texts = data
    expected = calibrate_easd(
        pair.model, pair.assistant, texts[:3], tokenizer=pair.tokenizer, percentile=80, max_tokens=9
    )
    arguments = ["calibrate", "easd", *pair.options, "--percentile", 80, "--limit", 3, "--max-tokens", 9]
    for name in ("texts.txt", "texts.jsonl"):
        found = run_json(*arguments, "--data", folder / name, "--save", folder / "saved")
        assert found["target_entropy_threshold"] == pytest.approx(expected.target_entropy_threshold, abs=1e-5)
        assert found["draft_entropy_threshold"] == pytest.approx(expected.draft_entropy_threshold, abs=1e-5)
        assert (found["num_texts"], found["num_positions"]) == (3, 24)
        saved = EASDConfig.from_pretrained(folder / "saved")
        assert saved.target_entropy_threshold == found["target_entropy_threshold"]
        figures = json.loads((folder / "saved" / "calibration.json").read_text())
        assert figures["about"]["fingerprint"] == pair_fingerprint(pair.model.config, pair.assistant.config)
        assert figures["figures"]["target_entropy_threshold"] == found["target_entropy_threshold"]
        card = (folder / "saved" / "README.md").read_text()
        assert figures["about"]["fingerprint"] in card
        assert str(folder) not in card
    result = run(*arguments, "--data", folder / "texts.txt")
    assert f"target {expected.target_entropy_threshold:.3f}" in result.stdout
    assert "entropy quantile" in result.stdout


def test_positions_of_a_prompt_are_not_counted(run_json, pair, data):
    folder, _ = data
    arguments = ["calibrate", "easd", *pair.options, "--data", folder / "texts.jsonl"]
    assert run_json(*arguments)["num_positions"] == 4 * 11
    assert run_json(*arguments, "--prompt-field", "ask")["num_positions"] == 4 * 12


def test_other_options_of_a_saved_config_are_kept(run_json, pair, data):
    folder, _ = data
    EASDConfig(top_n=3, entropy_base=2.0).save_pretrained(folder / "base")
    arguments = ["calibrate", "easd", *pair.options, "--data", folder / "texts.txt", "--config", folder / "base"]
    config = run_json(*arguments)["config"]
    assert (config["top_n"], config["entropy_base"]) == (3, 2.0)


def test_mistakes_are_told_in_one_line(run, pair, data):
    folder, _ = data
    for options, message in (
        (["--data", folder / "texts.txt", "--config", "exact"], "must be an EASD config"),
        (["--data", folder / "nowhere.txt"], "No such file"),
        (["--data", folder / "texts.txt", "--prompt-field", "ask"], "--prompt-field names a field"),
        (["--data", folder / "texts.jsonl", "--field", "answer"], "there are ask, text"),
    ):
        result = run("calibrate", "easd", *pair.options, *options, code=2)
        assert len(result.stderr.splitlines()) == 1
        assert message in result.stderr
