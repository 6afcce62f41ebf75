"""Ridge regression from a middle layer's hidden states to what the final norm sees, in closed form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.training.exit_heads.observing import Observer
from hf_specdec.training.texts import Text


__all__ = ["NormalEquations", "fit_maps"]

_FILE, _TEXTS_PER_SAVE = "ridge.safetensors", 50


class NormalEquations:
    """`X'X` and `X'Y` of a regression with a constant, streamed in float64, so that no row of `X` is kept.

    Args:
        size (`int`): Width of inputs and outputs.
    """

    def __init__(self, size: int) -> None:
        self.gram = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        self.moment = torch.zeros(size + 1, size, dtype=torch.float64)

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Adds rows.

        Args:
            inputs, outputs (`torch.FloatTensor` of shape `(rows, size)`): What is mapped, and to what.
        """
        rows = nn.functional.pad(inputs.detach().cpu().double(), (0, 1), value=1.0)
        self.gram += rows.T @ rows
        self.moment += rows.T @ outputs.detach().cpu().double()

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return int(self.gram[-1, -1])

    def solve(self, ridge: float) -> Tensor:
        """`(size + 1, size)`, the matrix and below it the constant.

        Args:
            ridge (`float`): Penalty on the matrix, as a share of the mean square of the inputs times the rows; the constant
                goes free.

        Raises:
            [`InvalidConfigError`]: If no rows were added.
        """
        if self.num_rows == 0:
            raise InvalidConfigError("there are no tokens to fit to")
        size = len(self.gram) - 1
        penalty = torch.full((size + 1,), ridge * float(self.gram.diagonal()[:-1].mean()), dtype=torch.float64)
        penalty[-1] = 0.0
        solution: Tensor = torch.linalg.solve(self.gram + penalty.diag(), self.moment)
        return solution


def fit_maps(
    observer: Observer,
    heads: ExitHeads,
    texts: Sequence[Text],
    ridge: float,
    *,
    folder: Path | None = None,
    resume: bool = False,
    on_text: Callable[[int], None] | None = None,
) -> int:
    """Sets the matrix of every head to the ridge solution, and returns the number of tokens.

    Args:
        observer ([`Observer`]): Reads the texts.
        heads ([`ExitHeads`]): Linear or adapter heads; what runs before their matrices stays as it is.
        texts (`Sequence[Text]`): The texts.
        ridge (`float`): See [`NormalEquations.solve`].
        folder (`Path`, *optional*): Where sums are kept, to go on from with `resume`.
        on_text (`Callable[[int], None]`, *optional*): Called with the number of tokens so far.
    """
    sums = {depth: NormalEquations(heads.config.hidden_size) for depth in observer.exits}
    done = _load(folder, sums) if resume and folder is not None else 0
    for index, text in enumerate(texts[done:], start=done + 1):
        seen = observer.observe(text)
        for depth, equations in sums.items():
            with torch.no_grad():
                inputs = heads.before_map(seen.states[depth].to(heads.device), depth)[0, seen.first :]
            equations.add(inputs, seen.final[0])
        if folder is not None and (index % _TEXTS_PER_SAVE == 0 or index == len(texts)):
            _save(folder, sums, index)
        if on_text is not None:
            on_text(next(iter(sums.values())).num_rows)
    for depth, equations in sums.items():
        solution, matrix = equations.solve(ridge), heads.map_of(depth)
        matrix.load_state_dict({"weight": solution[:-1].T.float(), "bias": solution[-1].float()})
    return next(iter(sums.values())).num_rows


def _save(folder: Path, sums: dict[int, NormalEquations], num_texts: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{depth}.gram": each.gram for depth, each in sums.items()}
    tensors |= {f"{depth}.moment": each.moment for depth, each in sums.items()}
    unfinished = folder / f".unfinished-{_FILE}"
    save_file(tensors, unfinished, {"num_texts": str(num_texts)})
    os.replace(unfinished, folder / _FILE)


def _load(folder: Path, sums: dict[int, NormalEquations]) -> int:
    """Fills the sums, and says how many texts they hold."""
    if not (folder / _FILE).is_file():
        return 0
    with safe_open(folder / _FILE, framework="pt") as file:
        names = set(file.keys())
        if names != {f"{depth}.{part}" for depth in sums for part in ("gram", "moment")}:
            raise InvalidConfigError(
                f"{folder} holds sums for other exit layers ({sorted(names)}): resume with the same, or write elsewhere"
            )
        for depth, each in sums.items():
            each.gram, each.moment = file.get_tensor(f"{depth}.gram"), file.get_tensor(f"{depth}.moment")
        return int(file.metadata()["num_texts"])
