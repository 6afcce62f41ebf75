"""Settings for every test: offline, few threads, one seed, and the markers that need something special."""

import gc
import os
import threading


# Read when torch and transformers are imported, so they are set before.
os.environ["HF_HUB_OFFLINE"] = "0" if "HF_SPECDEC_HUB" in os.environ else "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

import hf_specdec.loop
from hf_specdec.drafters import assistant, head, self_draft, tree
from tests import own_process


HUB = "HF_SPECDEC_HUB"
REAL_MODELS = "HF_SPECDEC_REAL_MODELS"

# Tiny models run slower on several threads, and ten times slower on several threads of a busy machine.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is there now stays: garbage collection need not look at hundreds of thousands of objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = {
        "gpu": (not torch.cuda.is_available(), "needs a CUDA device"),
        "hub": (HUB not in os.environ, f"downloads checkpoints, which {HUB}=1 allows"),
        "real": (REAL_MODELS not in os.environ, f"needs the folder of real checkpoints in {REAL_MODELS}"),
    }
    for item in items:
        for marker, (skip, reason) in skips.items():
            if skip and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if "own_process" not in item.keywords:
        return None
    own_process.run(item)
    return True


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same random state, so it passes or fails alike in any order."""
    torch.manual_seed(0)


class _Ticks(threading.local):
    """A clock that a millisecond passes by each time a thread looks at it."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now / 1000


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop measures the same seconds in every run, so that how far the default drafts does not hang on the machine."""
    ticks = _Ticks()
    for module in (hf_specdec.loop, assistant, head, self_draft, tree):
        monkeypatch.setattr(module, "time", ticks)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """The folder of real checkpoints; only tests marked `real` may ask for it."""
    return Path(os.environ[REAL_MODELS])


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent
