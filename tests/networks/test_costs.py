"""What drafting and verifying cost at real sizes, in processor seconds: medians, since a busy machine adds to single ones."""

import statistics
import time

import pytest
import torch

from hf_specdec import AutoDrafter, load_model, pack_linears
from hf_specdec._compat import CACHE_KEY
from hf_specdec.drafters import DraftSettings, HeadDrafter
from hf_specdec.features import TargetFeatures
from hf_specdec.records import Budget, Context, Draft
from hf_specdec.tree_lm import TreeLM


pytestmark = pytest.mark.real
COLUMNS, NODES = 64, 16
PARENTS = [-1, -1, -1, 0, 0, 1, 1, 3, 3, 4, 5, 7, 8, 9, 11, 11]


class Measured:
    """A packed target after a prompt, and an EAGLE-3 network with random weights and a vocabulary of 16384 tokens."""

    def __init__(self, folder):
        self.model = load_model(folder, dtype=torch.float32)
        self.network = AutoDrafter.from_target(self.model, "eagle3", draft_token_ids=torch.arange(16384))
        pack_linears(self.network)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(100, 5000, (1, COLUMNS + 64), generator=generator)
        features = TargetFeatures(self.model, self.network.taps_of(self.model))
        prompt = self.tokens[:, :COLUMNS]
        with features.of_prompt(COLUMNS):
            outputs = self.model(prompt, use_cache=True, logits_to_keep=1)
        cache = outputs[CACHE_KEY]
        cache.activate_past_recording()
        self.target = TreeLM(
            self.model, cache=cache, held=prompt, forward=features.around(self.model), moved=features.store.move
        )
        features.follow(self.target)
        self.drafter = HeadDrafter(DraftSettings(self.model.config.vocab_size), self.network, features)
        self.length = torch.tensor([COLUMNS + 1])
        self.tree = Draft(self.tokens[:, -NODES:], torch.tensor([NODES]), parents=torch.tensor([PARENTS]))

    def run(self, rows):
        self.target.run(self.tokens, self.length + rows - 1, torch.tensor([rows]))

    def run_tree(self):
        self.target.run_tree(self.tokens, self.length, self.tree)

    def propose(self, steps):
        context = Context(self.tokens, self.length, None, torch.ones(1, dtype=torch.bool))
        self.drafter.propose(context, Budget(torch.tensor([steps])))


@pytest.fixture(scope="module")
def measured(real_models):
    with torch.no_grad():
        yield Measured(real_models / "qwen1.5")


def seconds(*functions, repeats=3):
    """The median of each; they take turns, so that all see the same machine."""
    times = [[] for _ in functions]
    for _ in range(1 + repeats):
        for function, own in zip(functions, times, strict=True):
            started = time.process_time()
            function()
            own.append(time.process_time() - started)
    return [statistics.median(own[1:]) for own in times]


@torch.no_grad()
def test_a_drafted_token_costs_at_most_eight_hundredths_of_a_step(measured):
    step, one, six = seconds(lambda: measured.run(1), lambda: measured.propose(1), lambda: measured.propose(6))
    assert (six - one) / 5 <= 0.08 * step, f"{(six - one) / 5 / step:.3f} of a step of {step:.3f} s"


@torch.no_grad()
def test_a_tree_costs_no_more_than_as_many_plain_rows(measured):
    rows, tree = seconds(lambda: measured.run(1 + NODES), measured.run_tree)
    assert tree <= 1.15 * rows, f"{tree / rows:.3f} times {rows:.3f} s"
