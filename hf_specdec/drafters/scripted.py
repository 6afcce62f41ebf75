"""A drafter that proposes what it was told to: for tests and for replaying recorded drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.records import Budget, Context, Draft


__all__ = ["ScriptedDrafter"]


@final
class ScriptedDrafter(DrafterBase):
    """Drafts from a script of continuations.

    Args:
        settings ([`DraftSettings`]): What it must know about the run.
        script (`Sequence[Sequence[int]]`): One list of tokens per row: what the row would draft after its prompt. After
            `n` new tokens the row drafts `script[row][n:]`. A single list serves every row.
        prompt_columns (`int`, *optional*): Columns of the prompt; those of the first context by default.
    """

    def __init__(
        self, settings: DraftSettings, script: Sequence[Sequence[int]], prompt_columns: int | None = None
    ) -> None:
        super().__init__(settings)
        self.script = [list(each) for each in script]
        self.prompt_columns = prompt_columns

    def propose(self, context: Context, budget: Budget) -> Draft:
        if self.prompt_columns is None:
            self.prompt_columns = int(context.lengths.max()) - 1  # the prefill already gave one token
        drafted = []
        for row in range(context.batch_size):
            script = self.script[row if len(self.script) > 1 else 0]
            start = int(context.lengths[row]) - self.prompt_columns
            drafted.append(script[start : start + int(budget.max_tokens[row])] if bool(context.unfinished[row]) else [])
        width = max(map(len, drafted))
        tokens = torch.tensor([each + [0] * (width - len(each)) for each in drafted], dtype=torch.long)
        return Draft(tokens.view(context.batch_size, width), torch.tensor(list(map(len, drafted))), source="scripted")
