"""What a pinned checkpoint is read from does not move with its repository."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from tests.networks.pins import commit_of


OLD, LAST, NEW = "a" * 40, "b" * 40, "c" * 40


class _Hub:
    """Answers as `HfApi.list_repo_commits` does."""

    def list_repo_commits(self, repo):
        assert repo == "org/drafter"
        times = [(NEW, 2026, 1, 1, 0, 0), (LAST, 2025, 12, 31, 23, 59), (OLD, 2024, 12, 31, 8, 0)]
        return [SimpleNamespace(commit_id=name, created_at=datetime(*time, tzinfo=UTC)) for name, *time in times]


def test_a_day_is_the_last_commit_until_its_end():
    assert commit_of("org/drafter", "2025-12-31", _Hub()) == LAST
    assert commit_of("org/drafter", "2025-12-30", _Hub()) == OLD


def test_a_commit_is_itself_and_asks_nobody():
    assert commit_of("org/drafter", OLD, api=object()) == OLD


def test_a_branch_is_no_pin_and_a_day_before_the_first_commit_is_an_error():
    with pytest.raises(ValueError, match="main"):
        commit_of("org/drafter", "main", _Hub())
    with pytest.raises(LookupError, match="2020-01-01"):
        commit_of("org/drafter", "2020-01-01", _Hub())
