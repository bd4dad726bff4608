"""Drafters of several kinds for one model, side by side: a run's own and those of the runs that lie inside it."""

from collections.abc import Mapping
from pathlib import Path

from medusa_cli.assembly import load_drafting, static_tree
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.backbone import Backbone
from medusa_cli.decoding import Lookup, Pace
from medusa_cli.drafters import DRAFTERS, Drafter
from medusa_cli.errors import UserError
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.resolve import Choice, choose
from medusa_cli.runs.run import Run
from medusa_cli.tree import Growth, Tree


def find_competitors(
    names: list[str], model: str | None, run: str | None, tree: str | None, lookup: bool | None = None
) -> dict[str, Choice]:
    """Where the drafters lie that methods name: by a run inside the run, else by their kind; UserError if nowhere.

    "medusa" alone is whatever drafter the run has; beside another such name it is the kind.
    """
    outer = Run.open(run) if run else Run.pretrained(model or DEFAULT_MODEL)
    inner = {name for name in names if run and outer is not None and _kind(outer.path / name)}
    named = [name for name in names if name in DRAFTERS or name in inner]
    if named in ([], ["medusa"]):
        return {}
    found = {}
    for name in named:
        if outer is not None and name in inner:
            found[name] = choose(model, str(outer.path / name), None, tree, lookup=lookup)
        elif outer is not None and _kind(outer.path) == name:
            found[name] = choose(model, run, None, tree, lookup=lookup)
        else:
            place = run or "NAME"
            raise UserError(
                f"@methods {name}: there is no {name} drafter in {outer.path if outer else 'any run'}",
                f"train one with `medusa train drafter={name} --run runs/{place}/{name}`, and give @run {place}",
            )
    return found


def _kind(folder: Path) -> str | None:
    """The kind of the drafter in a run, None where there is none."""
    config = Run(folder).drafter_dir / "config.json"
    return describe_drafter(config.parent).drafter if config.is_file() else None


def load_competitors(
    competitors: Mapping[str, Choice], backbone: Backbone
) -> dict[str, tuple[Drafter, Tree | Growth | Pace | Lookup]]:
    """Each rival's drafter and what it drafts over."""
    return {name: load_drafting(choice, backbone, static_tree(choice)) for name, choice in competitors.items()}
