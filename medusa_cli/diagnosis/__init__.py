"""Why is acceptance low? Checks of a run, each of which gives a finding: what was seen, and what helps."""

from dataclasses import replace

from medusa_cli.diagnosis import decoded, learning, matching, own_words
from medusa_cli.diagnosis.case import Case
from medusa_cli.diagnosis.findings import Check, Finding, worst
from medusa_cli.errors import UserError, explain_os

__all__ = ["CHECKS", "Case", "Check", "Finding", "chosen", "examine", "worst"]

CHECKS = (
    Check("backbone", matching.backbone),
    Check("calibration", matching.calibration),
    Check("tree", matching.tree),
    Check("chat template", own_words.template),
    Check("answer mask", own_words.mask),
    Check("own words", own_words.own_words),
    Check("over-fitting", learning.over_fitting),
    Check("training length", learning.converged),
    Check("acceptance", decoded.acceptance, decodes=True),
    Check("temperature", decoded.temperature, decodes=True),
    Check("tree size", decoded.tree_size, decodes=True),
)


def chosen(quick: bool) -> list[Check]:
    """All checks, or those that neither decode nor time steps."""
    return [one for one in CHECKS if not (quick and one.decodes)]


def examine(case: Case, check: Check) -> Finding:
    """What a check finds; unknown, with what helps, where a part that it needs is missing or damaged."""
    try:
        found = check.look(case)
    except UserError as reason:
        return Finding(check.name, "unknown", reason.message, reason.remedy)
    except OSError as reason:
        said, _, remedy = explain_os(reason).partition("; ")
        return Finding(check.name, "unknown", said, remedy)
    return replace(found, remedy="") if found.verdict == "ok" else found
