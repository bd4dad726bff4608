"""The steps of `medusa reproduce`: data, a drafter of each kind, and benches, each a command of this program."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_atomic, write_json
from medusa_cli.runs.reading import read_object

# Where the figures of the steps lie in the run.
FOLDER = "papers"
CONVERSATIONS = 600
RECIPES = Path("recipes")
# What the record of a step under way says its words by.
BEGUN = "begun"


@dataclass(frozen=True)
class Stage:
    """A command of this program, and the file that is there once it is done; `kept`: what it says in JSON."""

    name: str
    words: list[str]
    makes: Path
    kept: bool = False

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do; conversations come one by one."""
        if self.name != "distill" or not self.makes.is_file():
            return self.makes.is_file()
        with self.makes.open("rb") as lines:
            return sum(1 for _ in lines) >= CONVERSATIONS

    def run(self, quiet: bool, again: bool) -> None:
        """Run it in a process of its own, which gives all its memory back; UserError where it fails.

        again: the same words began it before, so that a training goes on from its checkpoint.
        """
        words = [*self.words, *(["--quiet"] if quiet else [])]
        if again and self.words[0] == "train" and (self.makes.parent.parent / "checkpoint.pt").is_file():
            words.append("--resume")
        done = subprocess.run([sys.executable, "-m", "medusa_cli", *words], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"the step {self.name} failed", f"look at `medusa {' '.join(self.words)}`")
        if self.kept:
            write_atomic(self.makes, done.stdout)


class Ledger:
    """The words under which each step of a run began or was done: one whose words are others by now is done again."""

    def __init__(self, run: Path, todo: Sequence[Stage]) -> None:
        self.path, self._todo = run / FOLDER / "steps.json", todo

    def holds(self, step: Stage) -> bool:
        """Whether a step is done as it is asked for."""
        return step.done and self._known().get(step.name) == step.words

    def begin(self, step: Stage) -> bool:
        """Keep the words of a step that begins, and forget the steps after it; whether the same words began it before.

        Those after it may read what it makes, all but figures: they are done again though their own words are the same.
        """
        known = self._known()
        again = known.get(step.name) in (step.words, {BEGUN: step.words})
        if not step.kept:
            later = [one.name for one in self._todo[self._todo.index(step) :]]
            known = {name: words for name, words in known.items() if name not in later}
        write_json(self.path, {**known, step.name: {BEGUN: step.words}})
        return again

    def end(self, step: Stage) -> None:
        """Keep the words of a step that is done."""
        write_json(self.path, {**self._known(), step.name: step.words})

    def _known(self) -> dict[str, Any]:
        """The words of a step that is done, and in BEGUN those of one under way, by its name."""
        if self.path.is_file():
            return read_object(self.path, "the record of the steps")
        # A run from before there was a record: what took hours is kept, of its figures nobody knows what was asked.
        return {step.name: step.words for step in self._todo if not step.kept}


def steps(run: Path, model: str, questions: int, tokens: int) -> list[Stage]:
    """All that is done, in order: the data, a drafter of each kind, and the benches."""
    found = [
        Stage(
            "distill",
            ["distill", "--run", f"{run}", "--model", model, "--max-samples", f"{CONVERSATIONS}"],
            run / "distill.jsonl",
        )
    ]

    def train(name: str, recipe: str, *settings: str) -> None:
        words = ["train", f"{RECIPES}/smollm2-135m-{recipe}.yaml", "--run", f"{run / name}", f"model={model}"]
        found.append(Stage(f"train {name}", [*words, *settings], run / name / "drafter" / "config.json"))

    def calibrate(name: str) -> None:
        words = ["calibrate", "--run", f"{run / name}"]
        found.append(Stage(f"calibrate {name}", words, run / name / "calibration.json"))

    for name, recipe, positions in (
        ("medusa", "medusa1", 400_000),
        ("amphista", "amphista", 400_000),
        ("hydra++", "hydra++", 400_000),
        ("firp", "firp", 80_000),
    ):
        train(name, recipe, f"train.max_tokens={positions}", "train.epochs=4", "train.soft=0.5")
        calibrate(name)
    train("medusa2", "medusa2", "--from", f"{run / 'medusa'}", "train.max_tokens=80000")
    train("direct", "direct", "train.max_tokens=80000")

    def keep(name: str, *words: str) -> None:
        found.append(Stage(name, [*words, "--json"], run / FOLDER / f"{name}.json", kept=True))

    asked = ["bench", "--mt-bench", "--limit", f"{questions}", "--max-new-tokens", f"{tokens}"]
    wide = ["--tree", "static:64"]
    heads, every = ["--run", f"{run / 'medusa'}"], ["--run", f"{run}", "--methods", "ar,medusa,amphista,hydra++,firp"]
    keep("auto", *asked, *heads, "--no-lookup", "--methods", "hf,ar,medusa")
    for nodes in (16, 22, 64):
        keep(f"{nodes} nodes", *asked, *every, "--tree", f"static:{nodes}")
    keep(
        "warm", *asked, "--run", f"{run}", "--methods", "medusa,amphista", "--tree", "static:64", "--temperature", "0.7"
    )
    tree = f"{run / FOLDER / 'tree.json'}"
    found.append(Stage("tree", ["tree", *heads, "--budget", "64", "--output", tree], Path(tree)))
    keep("joint", *asked, "--run", f"{run / 'medusa2'}", "--methods", "ar,medusa", "--tree", tree)
    keep("quality", "compare", f"{run / 'medusa2'}", f"{run / 'direct'}")
    keep("nodes", *asked, *heads, "--no-lookup", "--methods", "medusa", "--sweep", "nodes", "--values", "4,16,64")
    creative = ["--category", "writing,roleplay", "--methods", "medusa", *wide]
    keep("epsilon", *asked, *heads, *creative, "--sweep", "epsilon", "--values", "0.01,0.09,0.25")
    keep("layers", "bench-firp", "--run", f"{run}", "--tokens", "8000")
    return found
