"""CoSpec's policy (arXiv 2605.24793): counterfactual labels first, then reinforcement on correct answers. Ours, both."""

from hf_specdec.cospec.label_file import LabelFile
from hf_specdec.cospec.labels import Labelled, label_mismatches
from hf_specdec.cospec.reinforce import Episode, ReinforceOptions, ReinforceStep, reinforce
from hf_specdec.cospec.rollouts import ArbitrationSampler, Rollouts
from hf_specdec.cospec.run import CoSpecOptions, CoSpecResult, train_cospec
from hf_specdec.cospec.warm_start import agreement, warm_start


__all__ = [
    "ArbitrationSampler",
    "CoSpecOptions",
    "CoSpecResult",
    "Episode",
    "LabelFile",
    "Labelled",
    "ReinforceOptions",
    "ReinforceStep",
    "Rollouts",
    "agreement",
    "label_mismatches",
    "reinforce",
    "train_cospec",
    "warm_start",
]
