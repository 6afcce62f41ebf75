"""`specdec export` writes what `AutoDrafter` reads, and says what it cannot."""

import json
import shutil

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


@pytest.mark.parametrize(("taps", "told"), [([2, 3, 3], True), ([2, 3, 3], False), ([1, 3, 3], True)])
def test_layers_that_are_the_defaults_need_no_name(taps, told, folders, tmp_path):
    """What is the default depends on the target's number of layers."""
    config = json.loads((folders / "plain" / "config.json").read_text()) | {"taps": taps}
    copied = shutil.copytree(folders / "plain", tmp_path / "named")
    (copied / "config.json").write_text(json.dumps(config))
    target = ["--target", folders / "target"] if told else []
    result = run(copied, "--format", "eagle3", "--out", tmp_path / "out", *target)
    if taps == [2, 3, 3] and told:
        assert result.exit_code == 0, result.output
        network = AutoDrafter.from_pretrained(tmp_path / "out", target=small_target())
        assert network.taps_of(small_target()) == (2, 3, 3)
    else:
        assert result.exit_code == 2
        assert "do not know taps" in result.stderr
        assert ("--target" in result.stderr) == (not told)
