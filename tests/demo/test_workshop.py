"""What the experiments on the demo target share: nothing of another experiment is gone on with."""

import json

import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.quality.drafters.workshop import keep_plan, target_texts, weights_digest, windows
from tests.toys import tiny_llama


def test_windows_are_spread_evenly_and_need_enough_text():
    assert windows(torch.arange(10), 3, 4) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(InvalidConfigError, match="has 3 tokens, and a prompt is to have 4"):
        windows(torch.arange(3), 2, 4)


def test_a_plan_is_kept_and_another_one_refused(tmp_path):
    file = tmp_path / "plan.json"
    keep_plan(file, {"steps": 3, "start": "abc"})
    keep_plan(file, {"steps": 3, "start": "abc"})
    with pytest.raises(InvalidConfigError, match="start abc, now def"):
        keep_plan(file, {"steps": 3, "start": "def"})
    later = {"hass_on": "target"}
    keep_plan(file, {"steps": 3, "start": "abc", **later}, later=later)
    with pytest.raises(InvalidConfigError, match="hass_on target, now corpus"):
        keep_plan(file, {"steps": 3, "start": "abc", "hass_on": "corpus"}, later=later)


def test_drafters_are_told_apart_by_their_weights(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    first, second, third = (weights_digest(tmp_path / name) for name in "abc")
    assert first == third != second


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_written_once_and_the_same_after_a_kill(tmp_path, temperature):
    model, prompts = tiny_llama(), [[3, 4, each] for each in range(5, 12)]
    options = {"new_tokens": 6, "temperature": temperature, "batch_size": 3}
    seen = []

    def texts(name, prompts_=prompts):
        found = target_texts(model, prompts_, tmp_path / name, progress=lambda *each: seen.append(each), **options)
        return [text.tokens for text in found]

    whole = texts("whole")
    assert [text[:3] for text in whole] == [tuple(prompt) for prompt in prompts]
    lines = (tmp_path / "whole").read_text().splitlines()
    (tmp_path / "killed").write_text("\n".join(lines[:5]) + "\n[3, 4")  # in the middle of the second batch
    seen.clear()
    assert texts("killed") == whole
    assert seen == [(6, 7), (7, 7)]
    seen.clear()
    assert texts("killed") == whole
    assert seen == []
    with pytest.raises(InvalidConfigError, match="on other prompts"):
        texts("killed", [[9, 9, 9], *prompts[1:]])
    assert json.loads((tmp_path / "killed").read_text().splitlines()[0]) == list(whole[0])
