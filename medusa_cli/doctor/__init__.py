"""Examination of a run: checks that say why acceptance is low, each with a command that helps."""

from dataclasses import replace

from medusa_cli.doctor.checks import (
    Case,
    Check,
    Finding,
    acceptance,
    backbone,
    calibration,
    converged,
    mask,
    over_fitting,
    own_words,
    temperature,
    template,
    tree,
    tree_size,
    worst,
)
from medusa_cli.errors import UserError, of_system

__all__ = ["CHECKS", "Case", "Check", "Finding", "chosen", "examine", "worst"]

CHECKS = (
    Check("backbone", backbone),
    Check("calibration", calibration),
    Check("tree", tree),
    Check("chat template", template),
    Check("answer mask", mask),
    Check("own words", own_words),
    Check("over-fitting", over_fitting),
    Check("training length", converged),
    Check("acceptance", acceptance, decodes=True),
    Check("temperature", temperature, decodes=True),
    Check("tree size", tree_size, decodes=True),
)


def chosen(quick: bool) -> list[Check]:
    """Returns all checks, or only those that neither decode nor time steps."""
    return [one for one in CHECKS if not (quick and one.decodes)]


def examine(case: Case, check: Check) -> Finding:
    """Runs a check; the verdict is unknown if a part that it needs is missing or damaged."""
    try:
        found = check.look(case)
    except UserError as reason:
        return Finding(check.name, "unknown", reason.message, reason.remedy)
    except OSError as reason:
        error = of_system(reason)
        return Finding(check.name, "unknown", error.message, error.remedy)
    return replace(found, remedy="") if found.verdict == "ok" else found
