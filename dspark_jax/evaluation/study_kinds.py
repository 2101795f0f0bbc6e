"""Which analysis makes the report of each kind of study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dspark_jax.evaluation import study_analyses, study_serving
from dspark_jax.evaluation.studies import Kind, Study
from dspark_jax.evaluation.study_analyses import Workbench
from dspark_jax.evaluation.study_report import Report

KINDS: dict[Kind, Callable[[Study, Workbench, Path], Report]] = {
    "drafters": study_analyses.drafters,
    "main": study_analyses.main,
    "positions": study_analyses.positions,
    "threshold": study_analyses.threshold,
    "latency": study_analyses.latency,
    "calibration": study_serving.calibration,
    "load": study_serving.load,
}
