"""What RCSD learns from: rounds of ordinary speculative decoding."""

from hf_specdec.training.rcsd.book import RoundBook
from hf_specdec.training.rcsd.options import RCSDTraining
from hf_specdec.training.rcsd.recorder import RoundRecorder
from hf_specdec.training.rcsd.recording import DraftedRound, Recording, TopLaws
from hf_specdec.training.rcsd.rollouts import roll_out
from hf_specdec.training.rcsd.shards import read_shards


__all__ = [
    "DraftedRound",
    "RCSDTraining",
    "Recording",
    "RoundBook",
    "RoundRecorder",
    "TopLaws",
    "read_shards",
    "roll_out",
]
