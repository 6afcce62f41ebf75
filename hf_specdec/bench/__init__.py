"""Benchmarks: several ways of decoding the same prompts, side by side in one process."""

from hf_specdec.bench.arms import Arm, check_arms, parse_arm, widest_pass
from hf_specdec.bench.cost_log import CostLog
from hf_specdec.bench.costs import CostMeter, Costs, measure_costs
from hf_specdec.bench.divergence import divergences
from hf_specdec.bench.report import write_report
from hf_specdec.bench.runner import Benchmark, Row
from hf_specdec.bench.summary import summarize


__all__ = [
    "Arm",
    "Benchmark",
    "CostLog",
    "CostMeter",
    "Costs",
    "Row",
    "check_arms",
    "divergences",
    "measure_costs",
    "parse_arm",
    "summarize",
    "widest_pass",
    "write_report",
]
