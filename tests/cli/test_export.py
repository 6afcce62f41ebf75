"""`specdec export` writes what `AutoDrafter` reads, and says what it cannot."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.export import FORMATS
from tests.networks import drafter_for, small_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, target = tmp_path_factory.mktemp("drafters"), small_target()
    target.save_pretrained(folder / "target")
    drafter_for(target, "eagle3-reduced").save_pretrained(folder / "plain")
    drafter_for(target, "eagle3-norms").save_pretrained(folder / "norms")
    return folder


def run(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, folders, tmp_path):
    result = run(
        folders / "plain", "--format", format, "--out", tmp_path / "out", "--target", folders / "target", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == format
    network, original = (
        AutoDrafter.from_pretrained(path, target=small_target()) for path in (tmp_path / "out", folders / "plain")
    )
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in original.state_dict().items())


def test_what_a_format_cannot_say(folders, tmp_path):
    result = run(folders / "norms", "--format", "sglang", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "norm_before_residual" in result.stderr
    assert not (tmp_path / "out").exists()


def test_embeddings_need_the_target(folders, tmp_path):
    result = run(folders / "plain", "--format", "speculators", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "no target" in result.stderr
