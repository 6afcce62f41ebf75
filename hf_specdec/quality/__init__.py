"""What a method does to the quality of answers, with intervals and a control."""

from hf_specdec.quality.arms import parse_quality_arms
from hf_specdec.quality.control import RandomRejection
from hf_specdec.quality.gsm8k import Question, extract_answer, is_correct, prompt_for, read_questions
from hf_specdec.quality.report import write_report
from hf_specdec.quality.rows import Batch, Row, RowsFile
from hf_specdec.quality.runner import Evaluation
from hf_specdec.quality.statistics import Estimate, bootstrap_mean, paired_difference
from hf_specdec.quality.summary import summarize


__all__ = [
    "Batch",
    "Estimate",
    "Evaluation",
    "Question",
    "RandomRejection",
    "Row",
    "RowsFile",
    "bootstrap_mean",
    "extract_answer",
    "is_correct",
    "paired_difference",
    "parse_quality_arms",
    "prompt_for",
    "read_questions",
    "summarize",
    "write_report",
]
