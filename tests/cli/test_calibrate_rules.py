"""`specdec calibrate csd` and `nucleus`: what is printed and saved is what the functions find, and `generate` takes it."""

import json

import pytest

from hf_specdec import CorrectionMemory, CSDConfig, NucleusConfig
from hf_specdec.csd_calibration import calibrate_csd
from hf_specdec.nucleus_calibration import calibrate_nucleus


@pytest.fixture
def data(tmp_path):
    texts = [" ".join(f"w{(7 * row + 3 * place) % 59}" for place in range(12)) for row in range(4)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    return tmp_path, texts


def test_csd_fills_a_memory_and_saves_it_with_a_card(run, run_json, pair, data):
    folder, texts = data
    out = folder / "memory"
    options = [*pair.options, "--data", folder / "texts.txt", "--no-chat", "--max-new-tokens", 10, "--length", 3]
    found = run_json("calibrate", "csd", *options, "--save", out)
    prompts = [pair.tokenizer(text)["input_ids"] for text in texts]
    expected = calibrate_csd(pair.model, pair.assistant, prompts, max_new_tokens=10, length=3)
    memory = CorrectionMemory.load(out)
    assert dict(memory.items()) == dict(expected.memory.items())
    assert memory.fingerprint == found["fingerprint"] != ""
    assert found["num_mismatches"] == expected.num_mismatches > 0
    assert json.loads((out / "calibration.json").read_text())["figures"]["num_pairs"] == len(memory)
    card = (out / "README.md").read_text()
    assert memory.fingerprint in card
    assert expected.summary() in card
    assert str(folder) not in card
    assert CSDConfig.from_pretrained(out).rule.inner.memory == memory
    assert CSDConfig(memory=out).rule.inner.memory == memory
    assert CSDConfig.from_pretrained(out).protected_tokens == tuple(sorted(pair.tokenizer.all_special_ids))
    run("generate", *pair.options, "--config", out, "--prompt", "w1 w2", "--no-chat", "--max-new-tokens", 8)
    moved = out.rename(folder / "moved")
    assert CSDConfig.from_pretrained(moved).rule.inner.memory == memory
    more = run("calibrate", "csd", *options, "--save", folder / "more", "--start", moved)
    assert "the memory holds" in more.stdout
    twice = CorrectionMemory.load(folder / "more")
    assert dict(twice.items()) == {key: 2 * count for key, count in memory.items()}


def test_nucleus_prints_a_table_and_saves_a_config(run, run_json, pair, data):
    folder, texts = data
    options = ["calibrate", "nucleus", *pair.options, "--data", folder / "texts.txt", "--tv-bound", 0.1]
    found = run_json(*options, "--save", folder / "out")
    expected = calibrate_nucleus(pair.model, pair.assistant, texts, tokenizer=pair.tokenizer, tv_bound=0.1)
    assert found["chosen"]["nucleus_p"] == expected.chosen.nucleus_p
    assert [each["mean_tv"] for each in found["grid"]] == pytest.approx(
        [each.mean_tv for each in expected.grid], abs=1e-5
    )
    assert NucleusConfig.from_pretrained(folder / "out") == expected.config
    assert expected.summary() in (folder / "out" / "README.md").read_text()
    shown = run(*options, "--temperature", 0).stdout
    assert "mean TV" in shown
    assert "in greedy decoding" in shown
    assert "must be a nucleus config" in run(*options, "--config", "exact", code=2).stderr
