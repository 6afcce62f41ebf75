"""Learning from live use without forgetting."""

from hf_specdec.training.continual.mixing import cut_recordings, with_replay
from hf_specdec.training.continual.online import OnlineAdapter
from hf_specdec.training.continual.options import ContinualTraining, OnlineOptions
from hf_specdec.training.continual.stream import train_continually


__all__ = ["ContinualTraining", "OnlineAdapter", "OnlineOptions", "cut_recordings", "train_continually", "with_replay"]
