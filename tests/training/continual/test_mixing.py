"""Old texts among new ones, cut recordings, and the distance to a reference."""

import math

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.continual import cut_recordings, with_replay
from hf_specdec.training.losses import KLLoss, NearReferenceLoss, Unrolled
from hf_specdec.training.rcsd import DraftedRound, Recording
from hf_specdec.training.texts import Text


NEW = [Text((1, 2, 3 + index), 1) for index in range(6)]
OLD = [Text((9, 9, index), 1) for index in range(4)]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 2), (0.4, 4), (0.5, 6), (0.75, 18)])
def test_the_share_is_kept_and_old_texts_take_turns(share, count):
    state = torch.get_rng_state()
    mixed = with_replay(NEW, OLD, share, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert mixed[: len(NEW)] == NEW
    replayed = mixed[len(NEW) :]
    assert len(replayed) == count
    times = [replayed.count(text) for text in OLD]
    assert sum(times) == count
    assert max(times) - min(times) <= 1
    assert mixed == with_replay(NEW, OLD, share, seed=3)


def test_seeds_choose_differently():
    assert len({tuple(with_replay(NEW, OLD, 0.25, seed=seed)[6:]) for seed in range(8)}) > 1


def test_shares_that_cannot_be_made_are_refused():
    with pytest.raises(InvalidConfigError, match="below 1"):
        with_replay(NEW, OLD, 1.0)
    with pytest.raises(InvalidConfigError, match="no old texts"):
        with_replay(NEW, [], 0.5)


def test_recordings_are_cut_with_their_rounds():
    rounds = tuple(DraftedRound(anchor, (5,), (5,), 1) for anchor in (1, 2, 3))
    recordings = [Recording(Text((1, 2, 3, 4, 5, 6), 2), rounds), Recording(Text((1, 2, 3, 4, 5, 6, 7), 5), rounds)]
    (cut,) = cut_recordings(recordings, 5)
    assert cut == Recording(Text((1, 2, 3, 4, 5), 2), rounds[:2])
    with pytest.raises(InvalidConfigError, match="max_tokens"):
        cut_recordings(recordings, 2)


def test_the_distance_to_a_reference_by_hand():
    generator = torch.Generator().manual_seed(0)
    student, target, reference = ([torch.randn(1, 3, 5, generator=generator) for _ in range(2)] for _ in range(3))
    masks = [torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])]
    unrolled = Unrolled(student, target, masks, [torch.zeros(1, 3).long()] * 2, reference_logits=reference)
    distance = 0.0
    for step, column in ((0, 0), (0, 1), (1, 0)):
        ours, theirs = (
            each[step][0, column].exp() / each[step][0, column].exp().sum() for each in (student, reference)
        )
        distance += sum(b * math.log(b / a) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)) / 2
    value, alone = NearReferenceLoss(KLLoss(), 0.3)(unrolled), KLLoss()(unrolled)
    assert value.parts["distance"] == pytest.approx(distance, rel=1e-5)
    assert float(value.total) == pytest.approx(float(alone.total) + 0.3 * distance, rel=1e-5)
    with pytest.raises(InvalidConfigError, match="reference=True"):
        NearReferenceLoss(KLLoss())(Unrolled(student, target, masks, unrolled.tokens))
    with pytest.raises(InvalidConfigError, match="at least 0"):
        NearReferenceLoss(KLLoss(), -1.0)
