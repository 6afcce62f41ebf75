"""Ids of repositories on the Hub."""

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_specdec.errors import InvalidConfigError


__all__ = ["check_repo_id", "is_repo_id"]


def is_repo_id(name: str) -> bool:
    """Whether `name` can be `ORG/NAME` on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_repo_id(repo: str) -> None:
    """Raises an [`InvalidConfigError`] unless `repo` is `ORG/NAME`."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InvalidConfigError(f"--repo must be ORG/NAME, got {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise InvalidConfigError(f"--repo must be ORG/NAME, got {repo!r}")
