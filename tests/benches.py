"""`medusa bench` on a tiny run: what the files of its tests share."""

from pathlib import Path

from typer.testing import CliRunner, Result

from medusa_cli.cli import app
from tests.runs import save_model, save_questions, save_run


def save_bench(folder: Path) -> Path:
    """A tiny model, a run of it called mine, and questions; the folder."""
    save_run(folder / "mine", save_model(folder / "model"))
    save_questions(folder / "q.jsonl")
    return folder


def medusa(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def bench(place: Path, *words: str) -> Result:
    """A bench of the run there over the questions there, in fp32."""
    common = ["--questions", str(place / "q.jsonl"), "--run", str(place / "mine"), "--dtype", "fp32"]
    return medusa("bench", *common, "--max-new-tokens", "20", *words)
