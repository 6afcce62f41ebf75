"""A drafter that learns between the calls that it serves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from hf_specdec import SpeculativeConfig
from hf_specdec.errors import DrafterError, InvalidConfigError
from hf_specdec.networks import DraftNetwork, EagleDrafter
from hf_specdec.records import Round
from hf_specdec.training.continual.mixing import with_replay
from hf_specdec.training.continual.options import ContinualTraining, OnlineOptions
from hf_specdec.training.continual.saving import OnlineState, read_state, write_state
from hf_specdec.training.continual.stream import train_continually
from hf_specdec.training.rcsd import Recording, RoundRecorder
from hf_specdec.training.recipes import RECIPES, Recipe
from hf_specdec.training.stages import check_run
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import StepLog


__all__ = ["OnlineAdapter"]

logger = logging.getLogger(__name__)


@final
class OnlineAdapter:
    """Decodes with a drafter network, records the rounds, and trains the drafter a little between calls (that RCSD learns
    continually from what verification shows is published, this procedure is ours).

    The target is read only, the texts are those of `target.generate` with the same config, and nothing is trained while a
    call runs. Every update is a short run of the trainer with moments of its own, on recorded texts and replayed ones, near
    to the drafter as it was when the adapter was made. An update that fails leaves the drafter as it was before it.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The drafter, in float32. It is trained in place.
        replay (`Sequence[Text]`): Texts of what it is not to forget.
        continual ([`ContinualTraining`], *optional*): How it is kept from forgetting. Without texts to replay, pass
            `replay_share=0.0`.
        options ([`OnlineOptions`], *optional*): How often and how much it learns.
        config ([`SpeculativeConfig`], *optional*): How calls are decoded; 5 drafts per round, judged exactly, unless given.
        recipe ([`Recipe`], *optional*): Loss and drafts per chain; `hass` for networks of the EAGLE-1 family and `kl` for
            others unless given.
        pad_token_id (`int`, *optional*): What prompts are padded with on the left, which is not learnt.

    Raises:
        [`InvalidConfigError`]: If the network is not in float32, or there is nothing to replay.
        [`IncompatibleDraftError`]: If the network does not fit the target.
    """

    def __init__(
        self,
        target: Any,
        network: DraftNetwork,
        *,
        replay: Sequence[Text] = (),
        continual: ContinualTraining | None = None,
        options: OnlineOptions | None = None,
        config: SpeculativeConfig | None = None,
        recipe: Recipe | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        self.continual, self.options = continual or ContinualTraining(), options or OnlineOptions()
        if network.dtype != torch.float32:
            raise InvalidConfigError(
                f"a drafter that learns must be float32, got {network.dtype}: load it with dtype=torch.float32"
            )
        if not isinstance(config, SpeculativeConfig | None):
            raise InvalidConfigError(
                "the adapter records rounds of chains under any rule, so its config must be a SpeculativeConfig, got "
                f'{type(config).__name__}: pass SpeculativeConfig(drafting="model", length=...)'
            )
        with_replay([], replay, self.continual.replay_share)  # refuses a share of nothing before the first call
        network.check_attached(target)
        self.target, self.network, self.replay = target, network, tuple(replay)
        self.config = config or SpeculativeConfig(drafting="model", length=5)
        self.recipe = recipe or RECIPES["hass" if isinstance(network, EagleDrafter) else "kl"]
        check_run([self.recipe], self.options.training(0), 1, network)
        self.reference = network.twin().requires_grad_(False)
        self.enabled, self.pad_token_id = True, pad_token_id
        self.recordings: deque[Recording] = deque(maxlen=self.options.capacity)
        self.num_updates, self.calls_since_update = 0, 0
        self._is_busy = False

    def generate(self, *args: Any, round_callback: Callable[[Round], None] | None = None, **kwargs: Any) -> Any:
        """`target.generate(*args, **kwargs)` with the drafter, followed by an update where one is due.

        While `enabled` is False, calls are neither recorded nor learnt from.

        An update that fails switches the adapter off with a warning, so that no answer is lost, unless the config says
        `on_drafter_error="raise"`.

        Raises:
            [`InvalidConfigError`]: If the call names a drafter or a config of its own, or another call runs.
        """
        if given := sorted({"assistant_model", "speculative_config"} & kwargs.keys()):
            raise InvalidConfigError(
                f"the adapter decodes with its own drafter and config, got {' and '.join(given)}: pass them to OnlineAdapter"
            )
        self._refuse_while_busy("generate")
        recorder = RoundRecorder(rule=self.config.rule, pad_token_id=self.pad_token_id)
        config, callback = self.config, round_callback
        if self.enabled:
            config = replace(config, acceptance=recorder, guard=None)  # the recorder's rule has its guard already

            def callback(round_: Round) -> None:
                recorder(round_)
                if round_callback is not None:
                    round_callback(round_)

        self._is_busy = True
        try:
            output = self.target.generate(
                *args, assistant_model=self.network, speculative_config=config, round_callback=callback, **kwargs
            )
        finally:
            self._is_busy = False
        if self.enabled:
            recorder.close()
            self.recordings.extend(recorder.recordings)
            self.calls_since_update += 1
            if self.recordings and 0 < self.options.every <= self.calls_since_update:
                self._update_when_due()
        return output

    def update(self) -> list[StepLog]:
        """Trains the drafter on what was recorded.

        Raises:
            [`InvalidConfigError`]: If nothing was recorded, or a call runs.
            [`DrafterError`]: If the weights would no longer be finite.
        """
        self._refuse_while_busy("update")
        before = _weights(self.network)
        self._is_busy = True
        try:
            logs = train_continually(
                self.target,
                self.network,
                self.recordings,
                self.replay,
                self.recipe,
                self.options.training(self.num_updates),
                self.continual,
                accelerator=Accelerator(device_placement=False),
                reference=self.reference,
            )
            _check_finite(self.network)
        except BaseException:
            self.network.load_state_dict(before)
            self.network.zero_grad()
            raise
        finally:
            self._is_busy = False
        self.num_updates, self.calls_since_update = self.num_updates + 1, 0
        return logs

    def _update_when_due(self) -> None:
        try:
            self.update()
        except Exception as error:  # memory that ran out too: the answer of the call is there, and must not be lost
            if self.config.on_drafter_error == "raise":
                raise
            self.enabled = False
            logger.warning("%s: %s. The drafter no longer learns; set enabled to go on.", type(error).__name__, error)

    def reset(self) -> None:
        """Gives the drafter the weights that it had when the adapter was made, and forgets what was recorded."""
        self._refuse_while_busy("reset")
        self.network.load_state_dict(self.reference.state_dict())
        self.recordings.clear()
        self.num_updates, self.calls_since_update = 0, 0

    def save(self, folder: str | Path) -> None:
        """Writes the drafter's weights, those of its reference and what was recorded. The folder appears whole, in the place
        of what an adapter saved there before. The texts to replay and the options are not in it."""
        self._refuse_while_busy("save")
        counts = {"num_updates": self.num_updates, "calls_since_update": self.calls_since_update}
        state = OnlineState(_weights(self.network), _weights(self.reference), tuple(self.recordings), counts)
        write_state(Path(folder), state)

    def restore(self, folder: str | Path) -> None:
        """Goes on from what [`~OnlineAdapter.save`] wrote.

        Raises:
            [`InvalidConfigError`]: If the folder holds no such state, or that of another network. Nothing is changed then.
        """
        self._refuse_while_busy("restore")
        state = read_state(Path(folder), self.network)
        self.network.load_state_dict(state.network)
        self.reference.load_state_dict(state.reference)
        self.recordings = deque(state.recordings, maxlen=self.options.capacity)
        self.num_updates, self.calls_since_update = state.counts["num_updates"], state.counts["calls_since_update"]

    def _refuse_while_busy(self, wanted: str) -> None:
        if self._is_busy:
            raise InvalidConfigError(
                f"{wanted} was called while a call or an update runs: call it when that has returned"
            )


def _weights(network: DraftNetwork) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def _check_finite(network: DraftNetwork) -> None:
    if not all(bool(parameter.isfinite().all()) for parameter in network.parameters()):
        raise DrafterError(
            "the update made weights that are not finite, so it was undone: pass OnlineOptions with a smaller learning_rate"
        )
