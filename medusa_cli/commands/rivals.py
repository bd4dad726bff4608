"""Drafters of several kinds for one model, side by side: a run's own and those of the runs that lie inside it."""

from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.commands.loading import Choice, choose, describe, load_drafting, static_tree
from medusa_cli.errors import UserError
from medusa_cli.run import Run, read_json

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.drafters import Drafter
    from medusa_cli.tree import Growth, Tree


def find_rivals(names: list[str], model: str | None, run: str | None, tree: str | None) -> dict[str, Choice]:
    """Where the drafters lie whose kinds are named as methods; UserError for one that is nowhere.

    "medusa" alone is whatever drafter the run has; beside another kind's name it is the kind.
    """
    from medusa_cli.drafters import DRAFTERS

    kinds = [name for name in names if name in DRAFTERS]
    if kinds in ([], ["medusa"]):
        return {}
    outer = Run.open(run) if run else Run.pretrained(model or DEFAULT_MODEL)
    found = {}
    for kind in kinds:
        if outer is not None and _kind(outer.path) == kind:
            found[kind] = choose(model, run, None, tree)
        elif run and outer is not None and _kind(outer.path / kind) == kind:
            found[kind] = choose(model, str(outer.path / kind), None, tree)
        else:
            place = run or "NAME"
            raise UserError(
                f"--methods {kind}: there is no {kind} drafter in {outer.path if outer else 'any run'}",
                f"train one with `medusa train drafter={kind} --run runs/{place}/{kind}`, and give --run {place}",
            )
    return found


def _kind(folder: Path) -> str | None:
    """The kind of the drafter in a run, None where there is none."""
    config = Run(folder).drafter_dir / "config.json"
    return read_json(config, "the drafter's config").get("drafter") if config.is_file() else None


def load_rivals(rivals: dict[str, Choice], backbone: "Backbone") -> "dict[str, tuple[Drafter, Tree | Growth]]":
    """Each rival's drafter and what it drafts over, said in a line each."""
    loaded = {}
    for name, choice in rivals.items():
        tree = static_tree(choice)
        assert tree is not None
        loaded[name] = load_drafting(choice, backbone, tree)
        console.info(f"{name}: {choice.drafter}, {describe(loaded[name][1])}")
    return loaded
