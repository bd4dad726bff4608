"""Whether the run's parts belong together: the model of today, the drafter, its calibration and its tree."""

from typing import Any

from medusa_cli.diagnosis.case import Case
from medusa_cli.diagnosis.findings import Finding
from medusa_cli.errors import shown
from medusa_cli.runs.accuracies import outdated
from medusa_cli.runs.made import Identity
from medusa_cli.runs.run import DIGESTS
from medusa_cli.training.prefill import rounding
from medusa_cli.tree.saved import tree_made


def backbone(case: Case) -> Finding:
    """Is the model that decodes the one that the drafter was trained on: its weights, its adapter, its rounding?"""
    name, before = "backbone", case.made.identity
    if not before:
        said = "the drafter does not say which model it was trained on"
        return Finding(name, "unknown", said, case.command("train"))
    now: Identity = {**case.backbone.identity}
    keys = ("architecture", "hidden_size", "vocab_size", "layers", *DIGESTS)
    other = [key for key in keys if None not in (before.get(key), now.get(key)) and before[key] != now[key]]
    if other:
        said = f"the drafter was trained on {shown(before.get('id'))}, which {shown(now.get('id'))} is not"
        return Finding(name, "bad", f"{said}: {', '.join(other)} differ", case.command("train"))
    if before.get("adapter") != now.get("adapter"):
        had, has = (f"adapter {one}" if one else "no adapter" for one in (before.get("adapter"), now.get("adapter")))
        said = f"the drafter was trained on the model with {had}; it runs with {has}"
        again = case.command("train", stage=2) if now.get("adapter") else case.command("train")
        return Finding(name, "bad", said, again)
    rounded = rounding(case.backbone)
    if before.get("rounding") != rounded:
        ways = (before.get("rounding") or "whole weights", rounded or "whole weights")
        said = f"the drafter was trained on {ways[0]}, the model runs on {ways[1]}: it answers otherwise"
        before_it: dict[str, Any] = (
            {f"load_in_{before['rounding']}": True} if before.get("rounding") else {"engine": "auto"}
        )
        return Finding(name, "warn", said, case.command("chat", **before_it))
    with_it = f" with adapter {now['adapter']}" if now.get("adapter") else ""
    whole = rounded or "whole weights"
    return Finding(name, "ok", f"{now.get('id')}{with_it}, {whole}, is what the drafter was trained on")


def calibration(case: Case) -> Finding:
    """Was the calibration measured on the drafter that is there now?"""
    return _stamped(case, "calibration", case.heads.drafter, case.command("calibrate"))


def tree(case: Case) -> Finding:
    """Was the tree searched for the drafter that is there now?"""
    again = case.tree_command
    if not case.run.tree_path.is_file():
        return Finding("tree", "unknown", f"{case.run.path} has no tree of its own", again)
    made = case.read(lambda: tree_made(case.run.tree_path), again)
    return _stamped(case, "tree", made.drafter_stamp, again)


def _stamped(case: Case, name: str, stamp: str | None, remedy: str) -> Finding:
    if stamp is None:
        # What ships was packed together; files of earlier versions, and trees given as widths, have no stamp.
        whose = "ships with the drafter" if case.called is None else "does not say for which drafter it was made"
        return Finding(name, "ok" if case.called is None else "unknown", f"the {name} {whose}", remedy)
    assert case.made is not None
    if outdated(stamp, case.run.drafter_dir):
        return Finding(name, "bad", f"the {name} was made for an earlier drafter, not for the one there now", remedy)
    return Finding(name, "ok", f"the {name} was made for this drafter")
