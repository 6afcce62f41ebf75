"""Revisions of Hub checkpoints that stay what they are: a commit, or where none is known the last one of a day in the past."""

import re
from datetime import date

from huggingface_hub import HfApi


def commit_of(repo: str, pin: str, api: HfApi | None = None) -> str:
    """The commit itself, or for a day (`YYYY-MM-DD`) the newest one of `main` until its end (UTC).

    Raises:
        LookupError: If the repository has no commit of that day or before.
    """
    if re.fullmatch("[0-9a-f]{40}", pin):
        return pin
    day = date.fromisoformat(pin)
    commits = [each for each in (api or HfApi()).list_repo_commits(repo) if each.created_at.date() <= day]
    if not commits:
        raise LookupError(f"{repo} has no commit until {pin}")
    return max(commits, key=lambda each: each.created_at).commit_id
