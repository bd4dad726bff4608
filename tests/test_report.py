"""`medusa report` and `bench --report`: intervals and positions by hand, the page's content, the page in a browser."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from medusa_cli.benchmarks.background import ceilings
from medusa_cli.benchmarks.ceilings import multiplied
from medusa_cli.benchmarks.charts import Point, lines
from medusa_cli.benchmarks.intervals import bootstrap, rate, ratio_of_rates
from medusa_cli.benchmarks.tally import Tally, by_position
from medusa_cli.cli import app
from medusa_cli.decoding import Step
from medusa_cli.engines import load_backbone
from tests.chromium import PROGRAM, look
from tests.runs import TREE, save_model, save_questions, save_run


def medusa(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, each with a bench: `mine` with --report."""
    folder = tmp_path_factory.mktemp("report")
    model = save_model(folder / "model")
    save_questions(folder / "q.jsonl", 6)
    methods = ["--methods", "hf,ar,medusa,medusa-dynamic"]
    for name, words in (("mine", ["--report"]), ("other", [])):
        save_run(folder / name, model, calibrated=True)
        common = ["--questions", str(folder / "q.jsonl"), "--run", str(folder / name), "--dtype", "fp32"]
        done = medusa("bench", *common, "--max-new-tokens", "16", "--tree", "static", *methods, *words)
        assert done.exit_code == 0, done.stderr
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_an_interval_holds_the_figure_and_narrows_with_more_questions() -> None:
    random = np.random.default_rng(4)
    wide, narrow = (bootstrap([[a, 1.0] for a in 10 + random.normal(size=count)], rate) for count in (8, 800))
    assert wide is not None and narrow is not None
    assert narrow[0] < 10 < narrow[1] and wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    # 1.96 standard errors of a mean to either side.
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.96 / 800**0.5, rel=0.15)
    assert bootstrap([[1.0, 2.0]], rate) is None


def test_a_ratio_of_two_methods_is_drawn_in_pairs() -> None:
    # Whatever the question, the first method takes half the time of the second.
    columns = [[tokens, tokens / 10, tokens, tokens / 5] for tokens in (1.0, 50.0, 400.0, 3.0)]
    assert bootstrap(columns, ratio_of_rates) == pytest.approx((2.0, 2.0))


def test_positions_and_nodes_are_counted_from_paths() -> None:
    step = {"tokens": [1], "drafted": 3, "accepted": 0, "draft_s": 0.0, "verify_s": 0.1}
    paths = [(0, 1, 3), (0, 1), (0, 2), (0,)]
    tally = Tally.of([Step(**step, prefill=True), *(Step(**step, path=path, nodes=4) for path in paths)])
    tally += Tally.of([Step(**step, path=(0, 1), nodes=2)])  # a tree cut at the end of the context
    assert tally.by_depth() == [1, 3, 1] and tally.usual_size == 4
    assert tally.of_tree(4) == [4, 2, 1, 1] and tally.of_tree(2) == [1, 1] and tally.of_tree(3) == []
    first, second = by_position(tally.by_depth())
    assert first == {"reached": 4 / 5, "after": 4 / 5} and second == {"reached": 1 / 5, "after": 1 / 4}


def test_ceilings_follow_from_weights_and_rates() -> None:
    rows = {"weight_bytes": 2e9, "copy_bytes_per_s": 1e11, "weights": 1e9, "operations_per_s": 1e12}
    assert ceilings(rows, 4) == pytest.approx((20.0, 8.0))


@pytest.mark.parametrize(("engine", "rounded"), [("eager", {}), ("fast", {}), ("eager", {"load_in_8bit": True})])
def test_the_weights_of_a_pass_are_counted_in_whatever_form_they_lie(
    tmp_path: Path, engine: str, rounded: dict[str, bool]
) -> None:
    model = save_model(tmp_path / "model", hidden=64)
    network = AutoModelForCausalLM.from_pretrained(model)
    matrices = sum(one.numel() for name, one in network.named_parameters() if one.dim() == 2 and "embed" not in name)
    network.bfloat16().save_pretrained(model)  # which a CPU may keep in fp16 beside rows of fp32
    assert multiplied(load_backbone(model, engine=engine, **rounded)) == matrices


def test_the_bench_holds_what_each_question_and_each_node_gave(place: Path) -> None:
    document = json.loads(only(place / "mine/bench", "*.json").read_text())
    drafted = document["methods"]["medusa"]
    assert [one["question"] for one in drafted["answers"]] == [str(i) for i in range(6)]
    assert sum(one["tokens"] for one in drafted["answers"]) == drafted["tokens"]
    assert document["drafting"]["medusa"]["shape"] == TREE.to_json() and len(drafted["hits"]) == TREE.size
    assert document["drafting"]["medusa-dynamic"]["shape"] is None
    assert sum(drafted["depths"]) == sum(one["steps"] for one in drafted["answers"]) == drafted["hits"][0]
    # Every accepted node has an accepted parent, and one node a depth is accepted a step.
    for node in range(1, TREE.size):
        assert drafted["hits"][node] <= drafted["hits"][TREE.parents[node]]
    first = [node for node in range(TREE.size) if TREE.depths[node] == 1]
    assert sum(drafted["hits"][node] for node in first) == sum(drafted["depths"][1:])
    assert document["environment"]["torch"] and document["rows"]["step_ms"]["64"] > 0


def test_the_page_has_every_section_and_needs_nothing_beside_it(place: Path) -> None:
    page = only(place / "mine/bench", "*.html").read_text()
    for title in (
        "What it gains", "Speedup by category", "Mean accepted length by category", "Where the gain comes from",
        "Acceptance by position", "Which nodes of the tree were accepted", "What a step costs", "Where outputs part",
        "How good the heads are", "Environment and versions",
    ):  # fmt: skip
        assert f"<h2>{title}</h2>" in page, title
    assert page.count("<svg") == page.count("</svg>") >= 8
    # Namespaces are names, not addresses; nothing else leads out of the page.
    assert set(re.findall(r'https?://[^"\s<]*', page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert {link for link in re.findall(r'href="#([^"]+)"', page)} <= set(names)
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): *(#\w+)", drawn)) == set()  # all colours come from the style sheet
    assert "6 questions" in page and "Nothing is drawn for medusa-dynamic" in page
    text = only(place / "mine/bench", "*.md").read_text()
    assert "| mean accepted length (with +1) |" in text and "## Acceptance by position" in text


def test_names_of_any_characters_are_shown_as_they_are(place: Path, tmp_path: Path) -> None:
    asked = [{"question_id": i, "category": one, "turns": ["w1"]} for i, one in enumerate(["$a$ | <b>", "c\nd & $"])]
    (tmp_path / "q&a $x$.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = ["--questions", str(tmp_path / "q&a $x$.jsonl"), "--run", str(tmp_path / "mine"), "--dtype", "fp32"]
    shutil.copytree(place / "mine", tmp_path / "mine", ignore=shutil.ignore_patterns("bench"))
    done = medusa("bench", *words, "--max-new-tokens", "4", "--methods", "ar,medusa")
    assert done.exit_code == 0, done.stderr
    saved = {path.suffix: path for path in (tmp_path / "mine/bench").iterdir()}
    output = tmp_path / "page.html"
    assert medusa("report", str(saved[".json"]), "--output", str(output)).exit_code == 0
    assert "$a$ | &lt;b&gt;" in output.read_text()
    for page in (saved[".md"], output.with_suffix(".md")):
        found = page.read_text().splitlines()
        assert found[0] == "# q&amp;a $x$.jsonl"
        assert any(line.startswith(r"| $a$ \| &lt;b&gt; ") for line in found)
        assert any(line.startswith("| c d &amp; $ ") for line in found)


def test_powers_on_an_axis_are_numbers() -> None:
    points = {"a": [Point(2.0**power, 1.0) for power in range(12)]}
    drawn = lines(points, "rows", "ms", "title", log=True)
    assert ">64</text>" in drawn and "$" not in drawn


def test_runs_stand_side_by_side(place: Path) -> None:
    output = place / "both.html"
    done = medusa("report", str(place / "mine"), str(place / "other"), "--output", str(output), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["written"] == [str(output), str(output.with_suffix(".md"))]
    text = output.with_suffix(".md").read_text()
    assert "| mine: medusa |" in text and "| other: medusa |" in text
    again = only(place / "other/bench", "*.json")
    twice = medusa("report", str(again), str(again), "--output", str(output))
    assert twice.exit_code == 0 and f"other {again.stem}: medusa" in output.read_text()


def test_a_bench_of_an_earlier_version_says_what_it_does_not_hold(place: Path, tmp_path: Path) -> None:
    document = json.loads(only(place / "mine/bench", "*.json").read_text())
    del document["environment"], document["rows"]
    for one in document["methods"].values():
        for key in ("answers", "depths", "by_position", "hits"):
            del one[key]
    (tmp_path / "old.json").write_text(json.dumps(document))
    done = medusa("report", str(tmp_path / "old.json"))
    assert done.exit_code == 0, done.stderr
    text = (tmp_path / "old.md").read_text()
    assert "Nothing is drawn for medusa, medusa-dynamic: no record of what each step accepted." in text
    assert " to " not in text.split("| medusa |")[1].splitlines()[0]  # no interval without questions


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "RUN 'nowhere'"),
        (["{place}/model"], "holds no bench"),
        (["{place}/nowhere.json"], "nowhere.json does not exist"),
        (["{place}/mine/calibration.json"], "calibration.json is no bench"),
        (["{place}/mine", "--output", "page.txt"], "--output page.txt is no name for a page"),
    ],
)
def test_mistakes_end_in_one_line(place: Path, words: list[str], part: str) -> None:
    done = medusa("report", *(word.format(place=place) for word in words))
    assert done.exit_code == (2 if "--output" in words else 1)
    assert part in done.stderr and done.stderr.count("error:") == 1


SEEN = """(() => {
  const table = document.querySelector("table"), heads = [...table.tHead.rows[0].cells];
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[1].textContent);
  const click = () => { heads[1].querySelector("button").click(); return [heads[1].ariaSort, column()]; };
  const texts = [...document.querySelectorAll("svg text")].map((one) => one.getBoundingClientRect());
  return {
    up: click(), down: click(), wide: document.documentElement.scrollWidth, room: window.innerWidth,
    ground: getComputedStyle(document.body).backgroundColor, small: Math.min(...texts.map((box) => box.height)),
    loaded: performance.getEntriesByType("resource").map((one) => one.name),
  };
})()"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("facts", [[0]]),
        ("drafting", [3]),
        ("methods", {"ar": {"speedup": "x"}}),
        ("baseline", "1e-300"),
    ],
)
def test_figures_that_no_bench_writes_are_refused_in_one_line(
    place: Path, tmp_path: Path, key: str, value: object
) -> None:
    document = json.loads(only(place / "mine/bench", "*.json").read_text())
    (tmp_path / "bench.json").write_text(json.dumps({**document, key: value}))
    done = medusa("report", str(tmp_path / "bench.json"))
    assert done.exit_code == 1 and "holds figures that no bench writes" in done.stderr, done.output
    assert "internal error" not in done.stderr and not list(tmp_path.glob("*.html"))


@pytest.mark.skipif(not PROGRAM, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_opens_in_a_browser(place: Path, tmp_path: Path, width: int, dark: bool) -> None:
    page = only(place / "mine/bench", "*.html")
    found, console = look(page, SEEN, tmp_path, width=width, dark=dark)
    assert console == [] and [one for one in found["loaded"] if not one.startswith("data:")] == []
    assert found["room"] == width and found["wide"] <= width, "the page is wider than its window"
    light = sum(map(int, re.findall(r"\d+", found["ground"])[:3])) > 3 * 128
    assert light is not dark
    assert found["small"] >= 6, "text on a chart is too small to read"
    for order, values in (found["up"], found["down"]):
        rates = [float(value.split()[0]) for value in values]
        assert rates == sorted(rates, reverse=order == "descending") and len(rates) == 4


@pytest.mark.skipif(not PROGRAM, reason="needs Chromium")
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_the_kept_report_opens_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    page = Path(__file__).parent.parent / "docs/results/mt-bench.html"
    script = "({wide: document.documentElement.scrollWidth, charts: document.querySelectorAll('svg').length})"
    found, console = look(page, script, tmp_path, width=width, dark=dark)
    assert console == [] and found["wide"] <= width and found["charts"] > 5
