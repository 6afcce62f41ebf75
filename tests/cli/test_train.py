"""`specdec train`."""

import json

import pytest

from hf_specdec import AutoDrafter, RCSDConfig
from hf_specdec.training.answers import is_held_out
from tests.toys import prompts as ids_of


PROMPTS = [f"w{index} w{index + 3} w{index + 1}" for index in range(12)]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


@pytest.fixture
def options(pair, data, tmp_path):
    short = ["--max-new-tokens", 8, "--batch-size", 2, "--held-out", 0.3, "--save-every", 2, "--dtype", "float32"]
    return ["train", "--target", pair.target, "--data", data, "--out", tmp_path / "drafter", *short]


@pytest.mark.parametrize("recipe", ["hass"])
def test_it_writes_a_drafter_that_loads(pair, options, run_json, tmp_path, recipe):
    found = run_json(*options, "--recipe", recipe, "--max-steps", 4)
    held_out = [prompt for prompt in PROMPTS if is_held_out(prompt, 0.3)]
    assert 0 < len(held_out) < len(PROMPTS)
    assert found["num_texts"] == len(PROMPTS) - len(held_out)
    assert found["tau"] >= 1
    answers = [json.loads(line) for line in (tmp_path / "drafter" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == found["num_texts"]
    network = AutoDrafter.from_pretrained(tmp_path / "drafter", target=pair.model)
    inputs = ids_of()
    asked = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    config = RCSDConfig(steps=3, on_drafter_error="raise")
    drafted = pair.model.generate(**inputs, **asked, assistant_model=network, speculative_config=config)
    assert drafted.tolist() == pair.model.generate(**inputs, **asked).tolist()


def test_checkpoints_are_not_overwritten_unasked(options, run, run_json):
    whole = run_json(*options, "--recipe", "hass", "--max-steps", 2)
    assert "--resume" in run(*options, "--recipe", "hass", "--max-steps", 2, code=2).stderr
    assert run_json(*options, "--recipe", "hass", "--max-steps", 2, "--resume")["tau"] == whole["tau"]


def test_prompts_on_one_side_only_are_refused(options, run):
    assert "held out" in run(*options, "--recipe", "hass", "--held-out", 0.0, code=2).stderr
