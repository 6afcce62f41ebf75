"""`serve.md`: launch lines that a shell splits into what the engines' options expect."""

import json
import re
import shlex

import pytest

from hf_specdec.networks.export import export_drafter
from tests.networks import drafter_for, small_target


def lines_of(folder):
    text = (folder / "serve.md").read_text()
    return [shlex.split(line) for line in re.findall(r"```bash\n(.*)\n```", text)]


def exported(tmp_path, kind, format, target="org/target"):
    network = drafter_for(small_target(), kind)
    network.config.target_name = target
    if format == "speculators":
        network.attach(small_target())
    return export_drafter(network, tmp_path / "out", format, steps=4)


@pytest.mark.parametrize(("kind", "format"), [("eagle3", "vllm"), ("eagle", "vllm"), ("eagle3", "eagle3")])
def test_vllm(kind, format, tmp_path):
    words = lines_of(exported(tmp_path, kind, format))[0]
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": kind, "model": ".", "num_speculative_tokens": 4}


@pytest.mark.parametrize(("kind", "format"), [("eagle3", "sglang"), ("eagle", "sglang"), ("eagle3", "eagle3")])
def test_sglang(kind, format, tmp_path):
    words = lines_of(exported(tmp_path, kind, format))[-1]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert options == {
        "--model-path": "org/target",
        "--speculative-algorithm": kind.upper(),
        "--speculative-draft-model-path": ".",
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }


def test_speculators_need_no_options(tmp_path):
    assert lines_of(exported(tmp_path, "eagle3", "speculators")) == [["vllm", "serve", "."]]


def test_an_unknown_target_is_said(tmp_path):
    folder = exported(tmp_path, "eagle3", "vllm", target=None)
    assert lines_of(folder)[0][2] == "TARGET"
    assert "does not name its target" in (folder / "serve.md").read_text()


def test_a_format_that_no_engine_reads(tmp_path):
    assert not (exported(tmp_path, "eagle3", "hf") / "serve.md").exists()
