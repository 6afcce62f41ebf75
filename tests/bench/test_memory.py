"""The high-water mark of a call."""

import sys

import pytest
import torch

from hf_specdec.bench import memory
from hf_specdec.bench.memory import PeakMemory


CPU = torch.device("cpu")
MANY = 200 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak")
def test_each_peak_is_its_own():
    """What was freed in between counts for the call that held it, and not for the next."""
    quiet = PeakMemory(CPU).read()
    if quiet is None:
        pytest.skip("the process may not start its high-water mark anew here")
    first = PeakMemory(CPU)
    torch.ones(MANY // 4)  # written to, so that it is resident, and freed at once
    assert first.read() >= quiet + 0.9 * MANY
    assert PeakMemory(CPU).read() <= quiet + 0.5 * MANY


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_cannot_be_told_is_none(device, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no folder" / "clear_refs")
    assert PeakMemory(torch.device(device)).read() is None
