"""A drafter's folder to the Hub, in one commit, with figures that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from hf_specdec.errors import InvalidConfigError, PublishError
from hf_specdec.hub.card import CARD, RESULTS, check_card
from hf_specdec.hub.repo_id import check_repo_id


__all__ = ["Upload", "prepare_upload", "publish"]

_WEIGHTS = "model*.safetensors"
_PATTERNS = (
    *("config.json", "generation_config.json", _WEIGHTS, "model.safetensors.index.json", CARD, RESULTS, "*.png"),
    *("serve.md", "custom_generate/*.py", "custom_generate/requirements.txt", "LICENSE*", "NOTICE*"),
    *("tokenizer*.json", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template.*"),
)
_ADVICE = {
    401: "Log in with `hf auth login`.",
    403: "Your token may not write to {repo}: use one with write access, or another --repo.",
    404: "It does not exist, or your token may not write to {repo}.",
}


@dataclass(frozen=True)
class Upload:
    """What a commit would hold.

    Args:
        folder (`Path`): The drafter's folder.
        repo (`str`): Hub id, `ORG/NAME`.
        files (`tuple[str, ...]`): Paths in the folder and in the repository, sorted.
        num_bytes (`int`): Their size together, in bytes.
    """

    folder: Path
    repo: str
    files: tuple[str, ...]
    num_bytes: int


def prepare_upload(folder: Path, repo: str) -> Upload:
    """Checks a folder and says what would be uploaded; nothing is sent.

    Only files that a drafter consists of are taken: no pickles, no rows of interrupted runs.

    Args:
        folder (`Path`): The drafter's folder: `config.json`, `model.safetensors`, `README.md` and `results.json`.
        repo (`str`): Hub id, `ORG/NAME`.

    Raises:
        [`InvalidConfigError`]: If a file is missing or a link that leaves the folder, the Hub id is none, or the card does not
            match `results.json`.
    """
    check_repo_id(repo)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = sorted(name for name in names if any(_matches(name, pattern) for pattern in _PATTERNS))
    if "config.json" not in files or not any(_matches(name, _WEIGHTS) for name in files):
        raise InvalidConfigError(f"{folder} must hold config.json and {_WEIGHTS}, got {sorted(names)[:8]}")
    _refuse_links(folder, files)
    check_card(folder)
    return Upload(folder, repo, tuple(files), sum((folder / name).stat().st_size for name in files))


def publish(upload: Upload, *, private: bool = False, api: HfApi | None = None) -> str:
    """Uploads in one commit, so that the weights are never seen without their card. Returns the commit's address.

    Args:
        upload ([`Upload`]): What [`prepare_upload`] returned.
        private (`bool`): Whether a repository that is made now is private; an existing one stays as it is.
        api (`HfApi`, *optional*): The client; by default one with the user's own token and endpoint.

    Raises:
        [`PublishError`]: If the Hub does not answer or refuses.
    """
    client = HfApi() if api is None else api
    try:
        client.create_repo(upload.repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, upload.folder / name) for name in upload.files]
        commit = client.create_commit(upload.repo, operations, commit_message="Drafter, card and measured results")
    except Exception as error:  # the client's HTTP library has errors of its own, and another library in other releases
        raise PublishError(_refusal(upload.repo, error)) from error
    return str(commit.commit_url)


def _refusal(repo: str, error: Exception) -> str:
    """What the Hub answered, in one sentence, and what to do."""
    doubt = f"An answer may have been lost on its way: look at {repo} before you try again."
    if not isinstance(error, HfHubHTTPError):
        return f"publishing {repo} failed with {type(error).__name__}: {str(error).rstrip('.')}. {doubt}"
    status = error.response.status_code
    said = error.server_message or str(error).strip().splitlines()[0]
    advice = f" {_ADVICE[status].format(repo=repo)}" if status in _ADVICE else ""
    outcome = doubt if status >= 500 else "Nothing was committed."
    return f"the Hub refused {repo} ({status}): {said.rstrip('.')}.{advice} {outcome}"


def _refuse_links(folder: Path, files: list[str]) -> None:
    """Raises if a file is a link to somewhere else, which the folder's owner may not mean to publish."""
    root = folder.resolve()
    for name in files:
        if not (folder / name).resolve().is_relative_to(root):
            raise InvalidConfigError(f"{name} is a link that leaves the folder {folder}: put the file itself there")


def _matches(name: str, pattern: str) -> bool:
    """As in a shell: `*` does not cross folders."""
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)
