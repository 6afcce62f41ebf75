"""Labels on the disk, so that a killed run goes on where it was: each costs an answer."""

from __future__ import annotations

from pathlib import Path
from typing import final

from safetensors.torch import save

from hf_specdec.acceptance.tagged_file import read_tagged
from hf_specdec.cospec.labels import Labelled
from hf_specdec.errors import InvalidConfigError
from hf_specdec.files import write_at_once


__all__ = ["LabelFile"]

_FORMAT = "hf_specdec.cospec_labels.v1"


@final
class LabelFile:
    """Labels of the first prompts of a set.

    Args:
        path (`Path`): A `.safetensors` file, written whole after each batch of prompts.
        about (`str`): What the labels depend on; a file that says something else is refused.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path, self.about = path, about

    def read(self) -> tuple[Labelled, int]:
        """What is there, and of how many prompts; nothing where there is no file.

        Raises:
            [`InvalidConfigError`]: If the labels are about something else, or the file is damaged.
        """
        if not self.path.exists():
            return Labelled.empty(), 0
        about, tensors = read_tagged(self.path, _FORMAT)
        if about.get("about") != self.about:
            raise InvalidConfigError(
                f"{self.path} holds labels of other models, questions or options: expected {self.about}, got "
                f"{about.get('about')}. Name another folder, or delete the file"
            )
        labelled = Labelled(tensors["features"], tensors["labels"].bool(), tensors["prompts"])
        return labelled, int(about["num_prompts"])

    def write(self, labelled: Labelled, num_prompts: int) -> None:
        """Takes the place of what was there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"format": _FORMAT, "about": self.about, "num_prompts": str(num_prompts)}
        write_at_once(self.path, save(vars(labelled), metadata=about))
