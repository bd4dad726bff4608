"""What is exported: a drafter, the model it belongs to, and what was measured of it, from a run or as it ships."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UserError
from medusa_cli.exporting.tensors import read_tensors
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.reading import read_object
from medusa_cli.runs.run import RUNS, Run, called


@dataclass(frozen=True)
class Source:
    """A run that holds a drafter, its config.json and weights as they are on disk, and the model's name.

    trusted: whether Python files of the model's may be run.
    """

    run: Run
    model: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)
    trusted: bool = False

    @property
    def kind(self) -> str:
        return str(self.config["drafter"])

    @property
    def adapter(self) -> Path | None:
        """What joint training added to the model, where there is such."""
        return self.run.adapter

    @property
    def identity(self) -> dict[str, Any]:
        """What names the model that the drafter was trained for."""
        made = self.config.get("provenance", {})
        return dict(made.get("backbone") or {}) if isinstance(made, dict) else {}

    @property
    def calibration(self) -> dict[str, Any] | None:
        """The accuracies that were measured, None where none were."""
        path = self.run.calibration_path
        return read_object(path, "the calibration") if path.is_file() else None

    @property
    def bench(self) -> str | None:
        """The newest report of `medusa bench` on this very drafter, as Markdown; None where there is none."""
        stamp, folder, shipped = stamp_of(self.run.drafter_dir), self.run.bench_dir, Run.pretrained(self.model)
        if shipped is not None and shipped.path == self.run.path:  # what ships is measured in a run of the model's name
            folder = Run(RUNS / called(self.model)).bench_dir
        for path in sorted(folder.glob("*.json"), reverse=True):  # named by their time
            drafting = read_object(path, "the report").get("drafting") or {}
            if path.with_suffix(".md").is_file() and stamp in [one.get(STAMP) for one in drafting.values()]:
                return path.with_suffix(".md").read_text(encoding="utf-8")
        return None


def find_source(run: str | None = None, model: str | None = None, trusted: bool = False) -> Source:
    """The run that is named, else what ships for the model (by default the default model); UserError where there is no
    drafter, or it is another model's."""
    from medusa_cli.drafters import drafter_kind

    name = model or DEFAULT_MODEL
    target = Run.open(run) if run else Run.pretrained(name)
    if target is None:
        raise UserError(f"no drafter ships for the model {name!r}", "train one, then give its @run")
    folder = target.drafter_dir
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds no drafter", "run `medusa train` or `medusa import` first, or give another @run"
        )
    kind = drafter_kind(folder)
    config = read_object(folder / "config.json", "the drafter's config")
    owner = target.model or config.get("base_model_name_or_path")
    if model is None and run is not None and isinstance(owner, str):
        name = owner
    return Source(target, name, config, read_tensors(folder / kind.weights_file), trusted)
