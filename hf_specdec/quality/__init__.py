"""What a method does to the quality of answers, with intervals and a control."""

from hf_specdec.quality.arms import parse_quality_arms
from hf_specdec.quality.control import RandomRejection
from hf_specdec.quality.gsm8k import Question, extract_answer, is_correct, prompt_for, read_questions
from hf_specdec.quality.humaneval import Problem, judge_code, read_problems
from hf_specdec.quality.judging import Item, Judgement
from hf_specdec.quality.report import write_report
from hf_specdec.quality.rows import Batch, Row, RowsFile
from hf_specdec.quality.rsd import CheckReward, LikelihoodReward, RewardGuided
from hf_specdec.quality.rule_arms import Learnt
from hf_specdec.quality.runner import Evaluation
from hf_specdec.quality.sandbox import run_program
from hf_specdec.quality.statistics import Estimate, bootstrap_mean, bootstrap_seeds, paired_difference, seeds_difference
from hf_specdec.quality.summary import pareto_front, summarize


__all__ = [
    "Batch",
    "CheckReward",
    "Estimate",
    "Evaluation",
    "Item",
    "Judgement",
    "Learnt",
    "LikelihoodReward",
    "Problem",
    "Question",
    "RandomRejection",
    "RewardGuided",
    "Row",
    "RowsFile",
    "bootstrap_mean",
    "bootstrap_seeds",
    "extract_answer",
    "is_correct",
    "judge_code",
    "paired_difference",
    "pareto_front",
    "parse_quality_arms",
    "prompt_for",
    "read_problems",
    "read_questions",
    "run_program",
    "seeds_difference",
    "summarize",
    "write_report",
]
