"""Ids of repositories on the Hub."""

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_specdec.errors import InvalidConfigError


__all__ = ["check_repo_id"]


def check_repo_id(repo: str) -> None:
    """Raises an [`InvalidConfigError`] unless `repo` is `ORG/NAME`."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InvalidConfigError(f"--repo must be ORG/NAME, got {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise InvalidConfigError(f"--repo must be ORG/NAME, got {repo!r}")
