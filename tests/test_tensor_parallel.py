"""A target whose weights are cut into shards that two processes hold (`tp_plan="auto"`)."""

import json
import subprocess
import sys

import pytest
import torch

from tests.networks import small_target
from tests.tensor_parallel import METHODS, REFUSED


@pytest.fixture(scope="module")
def found(tmp_path_factory, repo):
    """What each of the two processes found."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("sharded")
    small_target().save_pretrained(folder)
    command = [sys.executable, "-m", "tests.tensor_parallel", str(folder)]
    ran = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_process_holds_a_part(found):
    rows, width = small_target().model.layers[0].self_attn.q_proj.weight.shape
    assert [each["first shard"] for each in found] == [[rows // 2, width]] * 2


@pytest.mark.parametrize("method", METHODS)
def test_a_sharded_target_decodes_as_one_in_one_piece(found, method):
    for each in found:
        result = each["methods"][method]
        assert result["text"]
        # The length of a sharded run is fixed, and that of an ordinary one may be what pays.
        if method in ("itself", "prompt lookup"):
            assert result["drafted"][1] > 0
        else:
            assert result["drafted"][0] == result["drafted"][1] > 0
            assert result["accepted"][0] == result["accepted"][1]


def test_sampled_texts_are_the_same_in_every_process(found):
    whole, sharded = found[0]["methods"]["sampled"]
    assert sharded == whole == found[1]["methods"]["sampled"][1]


@pytest.mark.parametrize(("option", "word"), [("timed lengths", "GoodputLength"), ("reduced heads", "shards")])
def test_what_cannot_be_had_is_refused(found, option, word):
    assert option in REFUSED
    assert all(word in each["refused"][option] for each in found)


def test_shards_are_not_packed(found):
    assert [each["packed"] for each in found] == [0, 0]
