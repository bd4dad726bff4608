"""Benchmarks: question sets, decoding methods, interleaved measurement, reports."""

from medusa_cli.benchmarks.measure import Answers, Result, measure
from medusa_cli.benchmarks.methods import METHODS, Method, build_methods
from medusa_cli.benchmarks.questions import Question, spread
from medusa_cli.benchmarks.report import summarise
from medusa_cli.benchmarks.sets import read_questions

__all__ = [
    "METHODS",
    "Answers",
    "Method",
    "Question",
    "Result",
    "build_methods",
    "measure",
    "read_questions",
    "spread",
    "summarise",
]
