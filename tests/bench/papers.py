"""`make reproduce`: the papers' headlines as ratios, measured on a small model and set beside the papers' own.

Each command's output is kept in the run, so an interrupted reproduction resumes where it stopped.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONVERSATIONS = 600
DRAFTERS = ("medusa", "hydra++", "eagle", "amphista", "firp")
# The recipe of a drafter, if it has another name.
RECIPES = {"medusa": "medusa1"}
# The same for all. Small batches learn more from few positions.
EQUAL = (
    "train.epochs=4",
    "train.batch_tokens=512",
    "train.lr=1e-3",
    "train.soft=0.5",
    "train.scored=2048",
)
# Share of the positions for training runs in which the model runs, too.
SHARE_WITH_MODEL = 0.2


def medusa(*words: object) -> str:
    """Runs a medusa command in its own process and returns its stdout; if it fails, exits with its code."""
    print("medusa", *words, file=sys.stderr)
    command = [sys.executable, "-m", "medusa_cli", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


class Evidence:
    """Documents of the measurements by name."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents

    def length(self, name: str, method: str = "medusa") -> float:
        return self.documents[name]["methods"][method]["acceptance_length"]

    def over_medusa(self, name: str, method: str) -> float:
        return self.length(name, method) / self.length(name)

    def speedup(self, method: str) -> float:
        return self.documents["auto"]["methods"][method]["speedup"]

    def category(self, name: str) -> float:
        method = self.documents["64 nodes"]["methods"]["medusa"]
        return method["per_category"][name]["acceptance_length"] / method["acceptance_length"]

    def swept(self, sweep: str, key: str, series: str = "medusa") -> list[float]:
        return [
            point[key] for point in self.documents[sweep]["points"] if point["series"] == series
        ]

    def perplexity(self, run: str) -> float:
        return next(
            row["perplexity_ratio"] for row in self.documents["quality"] if row["run"].endswith(run)
        )

    def largest_tree(self) -> float:
        rates = self.swept("nodes", "tokens_per_s", "medusa, static")
        return max(rates) / rates[-1]

    def loosest_threshold(self) -> float:
        lengths = self.swept("epsilon", "acceptance_length")
        return lengths[0] / lengths[-1]


# The claim's place, its text, the paper's ratio of its smallest models (None: a figure without numbers), and ours.
CLAIMS: list[tuple[str, str, float | None, Callable[[Evidence], float]]] = [
    ("Medusa, Figure 4a", "Medusa-1 over transformers", 2.18, lambda e: e.speedup("medusa")),
    (
        "Medusa, Figure 4a",
        "drafts alone, over our plain loop",
        2.18,
        lambda e: e.speedup("medusa") / e.speedup("ar"),
    ),
    (
        "Medusa, Table 1",
        "Medusa-2 accepts several tokens per step",
        3.47,
        lambda e: e.length("joint"),
    ),
    (
        "Medusa, Table 2",
        "joint training over heads",
        2.83 / 2.18,
        lambda e: e.length("joint") / e.length("64 nodes"),
    ),
    (
        "Medusa, Table 2",
        "direct training harms",
        None,
        lambda e: e.perplexity("direct") / e.perplexity("medusa2"),
    ),
    ("Medusa, Figure 4b", "extraction gains most", 3.62 / 2.83, lambda e: e.category("extraction")),
    (
        "Medusa, Figure 4b",
        "coding gains more than the mean",
        3.29 / 2.83,
        lambda e: e.category("coding"),
    ),
    (
        "Medusa, Figure 6a",
        "64 sparse nodes over 64 dense",
        None,
        lambda e: e.length("64 nodes") / e.length("dense"),
    ),
    ("Medusa, Figure 6b", "the largest trees are slower", None, Evidence.largest_tree),
    ("Medusa, Figure 7", "looser thresholds accept more", None, Evidence.loosest_threshold),
    (
        "Amphista, Table 1",
        "Amphista, greedy",
        2.44 / 1.87,
        lambda e: e.over_medusa("64 nodes", "amphista"),
    ),
    (
        "Amphista, Table 1",
        "Hydra++, greedy",
        2.37 / 1.87,
        lambda e: e.over_medusa("64 nodes", "hydra++"),
    ),
    (
        "Amphista, Tables 1 and 9",
        "EAGLE, greedy",
        2.58 / 1.87,
        lambda e: e.over_medusa("64 nodes", "eagle"),
    ),
    (
        "Amphista, Table 2",
        "Amphista at temperature 0.7",
        2.37 / 1.86,
        lambda e: e.over_medusa("warm", "amphista"),
    ),
    (
        "Amphista, Table 7",
        "Amphista, 22 nodes",
        2.29 / 1.71,
        lambda e: e.over_medusa("22 nodes", "amphista"),
    ),
    ("FIRP, Table 3", "FIRP, 16 nodes", 2.762 / 2.334, lambda e: e.over_medusa("16 nodes", "firp")),
    ("FIRP, Table 3", "FIRP, 64 nodes", 3.148 / 2.647, lambda e: e.over_medusa("64 nodes", "firp")),
]


def outcome(paper: float | None, ours: float) -> str:
    """Returns "reproduced" from 80 % of the paper's effect (or a gain of 5 % without one), "in part" from 20 %."""
    share = (
        math.log(ours) / math.log(paper)
        if paper
        else 1.0
        if ours >= 1.05
        else 0.5
        if ours > 1
        else 0.0
    )
    return "reproduced" if share >= 0.8 else "in part" if share >= 0.2 else "not"


def trainings(run: Path, model: str, positions: int) -> Iterator[tuple[Path, list[object]]]:
    """Yields the file that each command of distilling and training leaves, and the command's words."""
    yield (
        run / "distill.jsonl",
        ["distill", "--run", run, "--model", model, "--max-samples", CONVERSATIONS],
    )
    few = int(SHARE_WITH_MODEL * positions)

    def train(name: str, recipe: str, count: int, *more: object) -> tuple[Path, list[object]]:
        words = [
            "train",
            f"recipes/smollm2-135m-{recipe}.yaml",
            "--run",
            run / name,
            f"model={model}",
            f"train.max_tokens={count}",
            *more,
        ]
        return run / name / "drafter" / "config.json", words

    for name in DRAFTERS:
        recipe = RECIPES.get(name, name)
        count = few if name == "firp" else positions
        own = ["train.lr=1e-2"] if name == "firp" else []
        yield train(name, recipe, count, *EQUAL, *own)
        yield run / name / "calibration.json", ["calibrate", "--run", run / name]
    yield train("medusa2", "medusa2", few, "--from", run / "medusa")
    yield train("direct", "direct", few)
    yield (
        run / "tree.json",
        ["tree", "--run", run / "medusa", "--budget", 64, "--output", run / "tree.json"],
    )


def benches(run: Path, questions: int, tokens: int) -> Iterator[tuple[str, list[object]]]:
    """Yields the name and the words of each measurement."""
    dense = [
        [a, b, c][:depth]
        for depth in (1, 2, 3)
        for a in range(3)
        for b in range(4)
        for c in range(4)
    ]
    (run / "dense-tree.json").write_text(
        json.dumps([list(path) for path in dict.fromkeys(map(tuple, dense))])
    )
    ask = ["bench", "--mt-bench", "--limit", questions, "--max-new-tokens", tokens]
    heads = [*ask, "--run", run / "medusa", "--no-lookup", "--methods"]
    yield "auto", [*heads, "hf,ar,medusa"]
    yield "dense", [*heads, "ar,medusa", "--tree", run / "dense-tree.json"]
    for nodes in (16, 22, 64):
        kinds = ["--methods", ",".join(("ar", *DRAFTERS))]
        yield f"{nodes} nodes", [*ask, "--run", run, *kinds, "--tree", f"static:{nodes}"]
    warm = ["--methods", "medusa,amphista", "--tree", "static:64", "--temperature", 0.7]
    yield "warm", [*ask, "--run", run, *warm]
    yield (
        "joint",
        [*ask, "--run", run / "medusa2", "--methods", "ar,medusa", "--tree", run / "tree.json"],
    )
    yield "quality", ["compare", run / "medusa2", run / "direct"]
    yield "nodes", [*heads, "medusa", "--sweep", "nodes", "--values", "4,16,64"]
    creative = ["--category", "writing,roleplay", "--tree", "static:64"]
    yield (
        "epsilon",
        [*heads, "medusa", *creative, "--sweep", "epsilon", "--values", "0.01,0.09,0.25"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/papers"))
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--positions", type=int, default=400_000, help="positions of each training")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a turn")
    asked = parser.parse_args()
    for file, words in trainings(asked.run, asked.model, asked.positions):
        if not file.is_file():
            medusa(*words)
    documents: dict[str, Any] = {}
    for name, words in benches(asked.run, asked.questions, asked.tokens):
        file = asked.run / f"{name}.json"
        if not file.is_file():
            file.write_text(medusa(*words, "--json"))
        documents[name] = json.loads(file.read_text())
    evidence = Evidence(documents)
    print(f"{asked.model}, {asked.questions} MT-Bench questions, {asked.tokens} tokens a turn\n")
    print("| where | what it says | paper | here | |\n|---|---|---|---|---|")
    for source, says, paper, ours in CLAIMS:
        ratio = ours(evidence)
        cell = f"{paper:.2f}" if paper else "-"
        print(f"| {source} | {says} | {cell} | {ratio:.2f} | {outcome(paper, ratio)} |")


if __name__ == "__main__":
    main()
