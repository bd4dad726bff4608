"""`medusa report` and `bench --report`: the page and the Markdown, hostile figures, the page in a browser."""

import base64
import json
import re
import shutil
from pathlib import Path

import pytest

from medusa_cli.bench.report import lines
from tests.helpers import bench, medusa, save_model, save_questions, save_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, each with a bench: `mine` with --report."""
    folder = tmp_path_factory.mktemp("report")
    model = save_model(folder / "model")
    save_questions(folder / "q.jsonl", 6)
    methods = ["--methods", "hf,ar,medusa,medusa-dynamic"]
    for name, words in (("mine", ["--report"]), ("other", [])):
        save_run(folder / name, model, calibrated=True)
        done = bench(folder, "--run", str(folder / name), "--tree", "static", *methods, *words)
        assert done.exit_code == 0, done.stderr
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_page_needs_nothing_beside_it(place: Path) -> None:
    page = only(place / "mine/bench", "*.html").read_text()
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(addresses) >= 4 and all(address.startswith("data:") for address in addresses)
    assert "| medusa |" in only(place / "mine/bench", "*.md").read_text()
    assert not list((place / "other/bench").glob("*.html"))  # only --report writes one


def test_runs_stand_side_by_side(place: Path) -> None:
    output = place / "both.html"
    done = medusa("report", str(place / "mine"), str(place / "other"), "--output", str(output), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["written"] == [str(output), str(output.with_suffix(".md"))]
    text = output.with_suffix(".md").read_text()
    assert "| mine: medusa |" in text and "| other: medusa |" in text
    again = only(place / "other/bench", "*.json")
    second = Path(shutil.copy(again, again.with_name("2026.json")))
    twice = medusa("report", str(again), str(second), "--output", str(output))
    second.unlink()
    assert twice.exit_code == 0 and f"other {again.stem}" in output.read_text()


def test_names_of_any_characters_are_shown_as_they_are(place: Path, tmp_path: Path) -> None:
    asked = [{"question_id": i, "category": name, "turns": ["w1"]} for i, name in enumerate(["$a$ | <b>", "c\nd & $"])]
    (tmp_path / "q&a $x$.jsonl").write_text("\n".join(map(json.dumps, asked)))
    shutil.copytree(place / "mine", tmp_path / "mine", ignore=shutil.ignore_patterns("bench"))
    words = ["--questions", str(tmp_path / "q&a $x$.jsonl"), "--run", str(tmp_path / "mine"), "--dtype", "fp32"]
    done = medusa("bench", *words, "--max-new-tokens", "4", "--methods", "ar,medusa", "--report")
    assert done.exit_code == 0, done.stderr
    assert "$a$ | &lt;b&gt;" in only(tmp_path / "mine/bench", "*.html").read_text()
    lines = only(tmp_path / "mine/bench", "*.md").read_text().splitlines()
    assert lines[0] == "# q&amp;a $x$.jsonl"
    assert any(line.startswith(r"| $a$ \| &lt;b&gt; ") for line in lines)
    assert any(line.startswith("| c d &amp; $ ") for line in lines)


def test_powers_on_an_axis_are_numbers() -> None:
    curves = {"$a$": [(2.0**power, 1.0, None) for power in range(12)], "b": []}
    address = lines("title", curves, "rows", "ms", log=True)["title"]
    drawn = base64.b64decode(address.partition(",")[2]).decode()
    assert ">64</text>" in drawn and ">$a$</text>" in drawn


@pytest.mark.parametrize(
    ("key", "value"),
    [("facts", [[0]]), ("drafting", 3), ("methods", {"ar": {"speedup": "x"}}), ("sampling", 3)],
)
def test_figures_that_no_bench_writes_are_refused_in_one_line(
    place: Path, tmp_path: Path, key: str, value: object
) -> None:
    document = json.loads(only(place / "mine/bench", "*.json").read_text())
    (tmp_path / "bench.json").write_text(json.dumps({**document, key: value}))
    done = medusa("report", str(tmp_path / "bench.json"))
    assert done.exit_code == 1 and "bench" in done.stderr, done.output
    assert "internal error" not in done.stderr and not list(tmp_path.glob("*.html"))
