"""The budget that pays: cost read off the curve, the best size, and `medusa tree --budget auto`."""

import json
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.decode.costs import measure_costs
from medusa_cli.runs.io import write_json
from medusa_cli.tree.search import (
    Budget,
    Costs,
    best_of_size,
    break_even,
    budgets,
    expected_length,
    interpolate,
    node_values,
    search,
)
from tests.helpers import medusa, medusa_drafter, save_model, save_run, tiny_backbone
from tests.test_drafters import amphista, hydra
from tests.test_firp import firp

ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.1, 0.05, 0.01]]


@pytest.fixture
def tiny_run(tmp_path: Path) -> Path:
    """A calibrated run of a tiny model."""
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    write_json(run.calibration_path, {"accuracies": ACCURACIES, "heads": 3})
    return run.path


def medusa_tree(*words: str) -> Result:
    return medusa("tree", *words)


def costs_of(slope: float, each_level: float = 0.0) -> Costs:
    """A machine on which a row costs `slope` seconds more than 10 ms, and a level of drafting so many."""
    verify = {n: 0.01 + slope * (n - 1) for n in (1, 8, 20, 30)}
    return Costs(verify, {level: each_level * level for level in (1, 2, 3)})


def best(costs: Costs) -> Budget:
    """The budget, of any size, that gives most tokens a second."""
    return max(budgets(ACCURACIES, costs), key=lambda one: one.tokens_per_s)


def test_cost_lies_on_the_line_between_measured_sizes_and_beyond_them() -> None:
    points = {1: 0.010, 9: 0.018, 17: 0.050}
    expected = [0.010, 0.014, 0.018, 0.034, 0.05, 0.082]  # beyond the last, on its slope
    assert [interpolate(points, n) for n in (1, 5, 9, 13, 17, 25)] == pytest.approx(expected)
    assert interpolate({1: 0.02, 4: 0.01}, 9) == 0.01  # noise makes no step cheaper and cheaper
    both = Costs(points, {1: 0.001, 3: 0.005})
    assert both.step(9, 2) == pytest.approx(0.021) and both.step(1, 0) == 0.010
    assert both.step(3, 3, batch=3) == pytest.approx(0.018 + 0.005)  # nine rows in one pass


@pytest.mark.parametrize("slope", [0.0, 0.0003, 0.002, 0.2])
def test_the_best_budget_is_the_best_of_all_sizes(slope: float) -> None:
    costs = costs_of(slope)
    chosen = best(costs)
    shown = budgets(ACCURACIES, costs)
    rates = [
        expected_length(search(ACCURACIES, n), ACCURACIES) / interpolate(costs.verify, n)
        for n in [one.tree.size for one in shown]
    ]
    assert chosen.tokens_per_s == pytest.approx(max(rates))
    assert [one.tree.size for one in shown] == [*range(1, 21), 24, 28]
    if slope == 0.0:
        assert chosen.tree.size == 28
    if slope == 0.2:
        assert chosen.tree.size == 1
    assert best_of_size(ACCURACIES, 8, costs).expected == pytest.approx(
        expected_length(search(ACCURACIES, 8), ACCURACIES)
    )


def test_a_further_node_pays_from_the_chance_that_makes_up_for_its_time() -> None:
    costs = costs_of(0.0005)
    chosen = best(costs)
    paying = break_even(chosen, costs)
    assert paying == pytest.approx(0.0005 * chosen.tokens_per_s)
    # The nodes of the chosen tree are those worth more than that, and the next best is not.
    worth = node_values(search(ACCURACIES, chosen.tree.size + 1), ACCURACIES)
    assert sorted(worth)[0] <= paying <= sorted(worth)[1]


def test_depth_is_left_where_it_costs_more_than_it_gives() -> None:
    assert best(costs_of(0.0001)).tree.max_depth == 3
    dear = best(costs_of(0.0001, each_level=0.006))
    assert dear.tree.max_depth == 1 and 1 < dear.tree.size <= 5


@pytest.mark.parametrize("make", [medusa_drafter, hydra, amphista, firp])
def test_measured_costs_are_of_every_size_and_depth(make) -> None:
    backbone = tiny_backbone(layers=6)
    steps: list[int] = []
    drafter = make(backbone)
    sizes = (1, 2, 5)
    costs = measure_costs(backbone, drafter, context=20, rounds=2, sizes=sizes, on_progress=steps.append)
    assert sorted(costs.verify)[:3] == [1, 2, 5] and sorted(costs.draft) == list(range(1, drafter.num_heads + 1))
    assert all(seconds > 0 for seconds in (*costs.verify.values(), *costs.draft.values()))
    assert len(steps) == 3 * (len(sizes) + drafter.num_heads)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_auto_finds_a_size_keeps_the_times_and_shows_it_beside_others(tiny_run: Path, own_home: Path) -> None:
    words = ["--run", str(tiny_run), "--budget", "auto"]
    first = medusa_tree(*words, "--json")
    assert first.exit_code == 0, first.output
    assert "timing decoding steps" in first.stderr
    report = json.loads(first.stdout)
    assert report["nodes"] == report["budgets"][0]["nodes"] == len(report["parents"])
    assert [row["nodes"] for row in report["budgets"][1:]][:3] == [1, 4, 8]
    assert report["budgets"][0]["tokens_per_s"] >= max(row["tokens_per_s"] for row in report["budgets"]) * 0.999
    assert (tiny_run / "step_cost.png").read_bytes()[:4] == b"\x89PNG"
    kept = (own_home / "timings.json").read_bytes()
    again = medusa_tree(*words)
    assert again.exit_code == 0 and "timing decoding steps" not in again.stderr and "tokens/s" in again.stdout
    assert (own_home / "timings.json").read_bytes() == kept
    measured = medusa_tree(*words, "--measure")
    assert "timing decoding steps" in measured.stderr and (own_home / "timings.json").read_bytes() != kept


@pytest.mark.parametrize("text", ["no json", "[]", '{"a": 1}', '{"0": {"verify": {}, "draft": {}}}'])
def test_a_damaged_file_of_times_is_done_without(tiny_run: Path, own_home: Path, text: str) -> None:
    own_home.mkdir()
    (own_home / "timings.json").write_text(text)
    done = medusa_tree("--run", str(tiny_run), "--budget", "auto")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("warning") <= 1
    assert medusa_tree("--run", str(tiny_run), "--budget", "auto").stderr.count("timing decoding steps") == 0


@pytest.mark.parametrize("part", ["verify", "draft"])
def test_kept_times_without_their_first_entry_are_taken_anew(tiny_run: Path, own_home: Path, part: str) -> None:
    words = ["--run", str(tiny_run), "--budget", "auto"]
    assert medusa_tree(*words).exit_code == 0
    times = json.loads((own_home / "timings.json").read_text())
    next(iter(times.values()))[part] = {}
    (own_home / "timings.json").write_text(json.dumps(times))
    done = medusa_tree(*words)
    assert done.exit_code == 0 and "timing decoding steps" in done.stderr, done.output


def test_a_budget_that_is_no_number_is_refused(tiny_run: Path) -> None:
    done = medusa_tree("--run", str(tiny_run), "--budget", "many")
    assert done.exit_code == 2 and "--budget 'many' is no number of nodes" in done.stderr
    done = medusa_tree("--calibration", str(tiny_run / "calibration.json"), "--budget", "auto")
    assert done.exit_code == 1 and "needs a drafter to time" in done.stderr
