"""Records that are cut."""

import torch

from hf_specdec.records import Draft


def test_the_first_tokens_of_a_draft_bring_along_what_is_known_of_them():
    """The first row is cut, so nothing was looked for in vain there; the second is as it was."""
    draft = Draft(
        torch.tensor([[5, 6, 7], [8, 0, 0]]),
        torch.tensor([3, 1]),
        num_attempted=torch.tensor([4, 2]),
        exit_depths=torch.tensor([[1, 2, 4], [2, 0, 0]]),
        source="self",
    )
    first = draft.first(torch.tensor([2, 2]))
    assert first.lengths.tolist() == [2, 1]
    assert first.num_attempted.tolist() == [2, 2]
    assert first.exit_depths.tolist() == [[1, 2], [2, 0]]
    assert [list(row) for row in first.kinds] == [[("self", 2)], [("self", 1)]]
    assert draft.first(torch.tensor([3, 1])) is draft
