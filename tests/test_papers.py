"""`medusa reproduce`: every claim of the papers is worked out of what its steps measure, and a killed one goes on."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from medusa_cli import cli
from medusa_cli.benchmarks import reproduction
from medusa_cli.benchmarks.papers import CLAIMS, Claim, held, markdown
from medusa_cli.benchmarks.reproduction import CONVERSATIONS, steps

KINDS = ("ar", "medusa", "amphista", "hydra++", "firp")


def bench(**rates: float) -> dict[str, Any]:
    accepted = dict.fromkeys(KINDS, 1.5) | rates
    categories = {"extraction": {"acceptance_rate": 1.8}, "coding": {"acceptance_rate": 1.5}}
    methods = {
        name: {"acceptance_rate": rate, "speedup": rate, "tokens_per_s": rate, "per_category": categories}
        for name, rate in accepted.items()
    }
    return {"methods": methods, "backbone": "m", "facts": ["two cores"]}


def point(series: str, x: float, accepted: float, rate: float = 10.0) -> dict[str, Any]:
    return {"series": series, "x": x, "acceptance_rate": accepted, "tokens_per_s": rate}


EVIDENCE: dict[str, Any] = {
    "auto": bench(medusa=2.0),
    "16 nodes": bench(firp=1.8),
    "22 nodes": bench(amphista=1.6),
    "64 nodes": bench(amphista=1.95),
    "warm": bench(),
    "joint": bench(medusa=1.95),
    "quality": [{"run": "p/medusa2", "perplexity_ratio": 1.01}, {"run": "p/direct", "perplexity_ratio": 2.02}],
    "nodes": {
        "points": [
            point("medusa, sparse", 16, 1.6, 12.0),
            point("medusa, sparse", 64, 1.8, 9.0),
            point("medusa, dense", 61, 1.5),
        ]
    },
    "epsilon": {"points": [point("medusa", 0.25, 1.5), point("medusa", 0.01, 1.65)]},
    "layers": {
        "figures": {
            "5": [{"accuracies": [0.4]}, {"accuracies": [0.2]}],
            "6": [{"accuracies": [0.4, 0.1]}, {"accuracies": [0.4, 0.1]}],
            "7": [{"accuracies": [0.4, 0.2]}, {"accuracies": [0.4, 0.25]}],
        }
    },
}


def test_every_claim_is_a_ratio_of_what_was_measured() -> None:
    rows = {(row["source"], row["says"]): row for row in held(EVIDENCE)}
    assert len(rows) == len(CLAIMS)

    def ours(source: str, says: str) -> tuple[float, str]:
        row = next(row for key, row in rows.items() if key[0] == source and says in key[1])
        return round(row["ours"], 3), row["verdict"]

    assert ours("Amphista, Table 1", "Amphista over") == (1.3, "reproduced")
    assert ours("Amphista, Table 7", "64 nodes over 22") == (1.219, "reproduced")
    assert ours("FIRP, Table 3", "16 nodes") == (1.2, "reproduced")
    assert ours("FIRP, Table 3", "64 nodes") == (1.0, "not")
    assert ours("Medusa, Table 2", "directly") == (2.0, "reproduced")
    assert ours("Medusa, Figure 4b", "extraction") == (1.2, "in part")
    assert ours("Medusa, Figure 6a", "sparse") == (1.2, "reproduced")
    assert ours("Medusa, Figure 6b", "slower") == (1.333, "reproduced")
    assert ours("Medusa, Figure 7", "looser") == (1.1, "reproduced")
    assert ours("FIRP, Figure 5", "last layers") == (2.0, "reproduced")
    assert ours("FIRP, Figure 7", "see the first") == (0.8, "not")
    page = markdown(list(rows.values()), ["two cores"])
    assert page.count("\n| ") == len(CLAIMS) + 1 and "two cores" in page


def test_a_claim_without_evidence_is_left_out() -> None:
    partial = {key: value for key, value in EVIDENCE.items() if key != "layers"}
    assert len(held(partial)) == len(CLAIMS) - 3


@pytest.mark.parametrize(
    ("paper", "found", "verdict"),
    [
        (1.3, 1.3, "reproduced"),
        (1.3, 1.1, "in part"),
        (1.3, 1.01, "not"),
        (1.3, 0.8, "not"),
        (None, 1.06, "reproduced"),
        (None, 1.01, "in part"),
        (None, 0.99, "not"),
    ],
)
def test_the_verdict_is_a_share_of_the_papers_effect(paper: float | None, found: float, verdict: str) -> None:
    assert Claim("", "", paper, lambda evidence: found).verdict(found) == verdict


def test_every_step_is_a_command_that_is_accepted() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Boundary)
    for step in steps(Path("runs/papers"), "smollm2-135m", 8, 64):
        group.commands[step.words[0]].make_context(step.words[0], list(step.words[1:]))


class Program:
    """Stands in for the program that each step is: every one leaves its file, a training its checkpoint as well."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.todo, self.ran, self.fails = steps(run, "smollm2-135m", 8, 64), list[tuple[str, bool]](), ""
        self._words = ["reproduce", "--run", str(run), "--output", str(run.parent / "out")]
        monkeypatch.setattr(subprocess, "run", self._step)
        monkeypatch.setattr(reproduction, "steps", lambda *asked: self.todo)

    def reproduce(self, fails: str = "") -> list[tuple[str, bool]]:
        """Run it all, or up to the step that fails; the steps that ran, and whether they were to resume."""
        self.ran, self.fails = [], fails
        done = CliRunner().invoke(cli.app, self._words)
        assert done.exit_code == bool(fails), done.output
        assert not fails or f"the step {fails} failed" in done.stderr
        return self.ran

    def change(self, name: str, word: str) -> int:
        """Ask a step for something else; its place."""
        place = next(i for i, step in enumerate(self.todo) if step.name == name)
        self.todo[place] = replace(self.todo[place], words=[*self.todo[place].words, word])
        return place

    def _step(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        step = next(step for step in self.todo if step.words == words[3 : 3 + len(step.words)])
        self.ran.append((step.name, words[-1] == "--resume"))
        step.makes.parent.mkdir(parents=True, exist_ok=True)
        if words[3] == "train":
            (step.makes.parent.parent / "checkpoint.pt").write_text("")
        if not step.kept and step.name != self.fails:
            step.makes.write_text("{}\n" * CONVERSATIONS)
        return subprocess.CompletedProcess(words, int(step.name == self.fails), json.dumps(EVIDENCE.get(step.name)))


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "papers"
    program = Program(run, monkeypatch)
    every = [(step.name, False) for step in program.todo]
    assert program.reproduce(fails="train amphista") == every[:4]
    assert program.reproduce(fails="warm") == [("train amphista", True), *every[4:16]]
    assert program.reproduce() == every[15:]
    rows = json.loads((tmp_path / "out" / "reproduction.json").read_text())["claims"]
    assert len(rows) == len(CLAIMS) and "| FIRP, Table 3 |" in (tmp_path / "out" / "reproduction.md").read_text()
    assert program.reproduce() == []
    program.change("64 nodes", "--quiet")  # figures, which no other step reads
    assert program.reproduce() == [("64 nodes", False)]
    place = program.change("train amphista", "train.soft=0.9")  # the steps after it read what it makes
    assert program.reproduce(fails="train hydra++") == every[place : place + 3]
    assert program.reproduce() == [("train hydra++", True), *every[place + 3 :]]
    assert program.reproduce() == []


def test_a_run_from_before_the_record_keeps_all_but_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "papers"
    program = Program(run, monkeypatch)
    program.reproduce()
    figures = [(step.name, False) for step in program.todo if step.kept]
    (run / "papers" / "steps.json").unlink()
    (run / "checkpoint.pt").write_text("")  # of a training that is no step
    assert program.reproduce() == figures
    (run / "papers" / "steps.json").unlink()
    (run / "direct" / "drafter" / "config.json").unlink()  # of a training that was killed
    assert program.reproduce()[0] == ("train direct", True)


def test_without_the_recipes_it_says_where_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["reproduce", "--run", str(tmp_path / "run")])
    assert done.exit_code == 1 and "there is no folder recipes/ here" in done.stderr
    assert not (tmp_path / "run").exists()
