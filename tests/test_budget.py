"""The budget that pays: cost read off the curve, the best size, and `medusa tree --budget auto`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medusa_cli.benchmarks.step_cost import measure_costs
from medusa_cli.cli import app
from medusa_cli.runs.files import write_json
from medusa_cli.tree import Tree
from medusa_cli.tree.budget import StepCost, best_budget, break_even, cost_of, judge
from medusa_cli.tree.search import expected_length, node_values, search
from tests.runs import save_model, save_run
from tests.test_generate import medusa
from tests.tiny import tiny_backbone

ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.1, 0.05, 0.01]]


@pytest.fixture
def tiny_run(tmp_path: Path) -> Path:
    """A calibrated run of a tiny model."""
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    write_json(run.calibration_path, {"accuracies": ACCURACIES, "heads": 3})
    return run.path


def medusa_tree(*words: str) -> Result:
    return CliRunner().invoke(app, ["tree", *words])


def test_cost_lies_on_the_line_between_measured_sizes() -> None:
    costs = [StepCost(3, 1, 0.010), StepCost(3, 9, 0.018), StepCost(3, 17, 0.050)]
    assert [cost_of(n, costs) for n in (1, 5, 9, 13, 17, 40)] == pytest.approx([0.010, 0.014, 0.018, 0.034, 0.05, 0.05])


@pytest.mark.parametrize("slope", [0.0, 0.0003, 0.002, 0.2])
def test_the_best_budget_is_the_best_of_all_sizes(slope: float) -> None:
    costs = [StepCost(3, n, 0.01 + slope * (n - 1)) for n in (1, 8, 20, 30)]
    chosen = best_budget(ACCURACIES, costs)
    rates = [expected_length(search(ACCURACIES, n), ACCURACIES) / cost_of(n, costs) for n in range(1, 31)]
    assert chosen.tokens_per_s == pytest.approx(max(rates))
    if slope == 0.0:
        assert chosen.tree.size == 30
    if slope == 0.2:
        assert chosen.tree.size == 1
    assert judge(ACCURACIES, 8, costs, 3).expected == pytest.approx(expected_length(search(ACCURACIES, 8), ACCURACIES))


def test_a_further_node_pays_from_the_chance_that_makes_up_for_its_time() -> None:
    costs = [StepCost(3, n, 0.010 + 0.0005 * (n - 1)) for n in (1, 8, 20, 30)]
    chosen = best_budget(ACCURACIES, costs)
    paying = break_even(chosen, costs)
    assert paying == pytest.approx(0.0005 * chosen.tokens_per_s)
    # The nodes of the chosen tree are those worth more than that, and the next best is not.
    worth = node_values(search(ACCURACIES, chosen.tree.size + 1), ACCURACIES)
    assert sorted(worth)[0] <= paying <= sorted(worth)[1]


def test_depth_is_left_where_it_costs_more_than_it_gives() -> None:
    def costs(each_head: float) -> list[StepCost]:
        return [StepCost(k, n, 0.01 + each_head * k) for k in (1, 2, 3) for n in (1, 4, 5, 20) if k > 1 or n < 20]

    assert best_budget(ACCURACIES, costs(0.0)).tree.max_depth == 3
    dear = best_budget(ACCURACIES, costs(0.01))
    assert dear.heads == 1 and dear.tree.max_depth == 1 and dear.tree.size == 5


def test_measured_costs_come_by_size_and_leave_out_the_warm_up() -> None:
    backbone = tiny_backbone()
    steps: list[int] = []
    trees = {(1, 1): Tree.root_only(), (3, 4): Tree.chain(3), (2, 10): Tree.dense([3, 2])}
    costs = measure_costs(backbone, medusa(backbone), trees, context=20, rounds=3, on_progress=steps.append)
    assert [(one.heads, one.nodes) for one in costs] == [(1, 1), (2, 10), (3, 4)] and all(
        one.seconds > 0 for one in costs
    )
    assert len(steps) == 5 * 3


def test_auto_finds_a_size_keeps_the_times_and_shows_it_beside_others(tiny_run: Path) -> None:
    first = medusa_tree("--run", str(tiny_run), "--budget", "auto", "--json")
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert report["nodes"] == report["budgets"][0]["nodes"] == len(report["parents"])
    assert [row["nodes"] for row in report["budgets"][1:]] == [1, 16, 32, 64]
    assert report["budgets"][0]["tokens_per_s"] >= max(row["tokens_per_s"] for row in report["budgets"]) * 0.999
    times = json.loads((tiny_run / "step_cost.json").read_text())
    assert [row["nodes"] for row in times["costs"]][-1] == 64 and times["engine"] in ("fast", "eager")
    assert (tiny_run / "step_cost.png").read_bytes()[:4] == b"\x89PNG"
    again = medusa_tree("--run", str(tiny_run), "--budget", "auto")
    assert "step times from" in again.stderr and "tokens/s" in again.stdout
    assert json.loads((tiny_run / "step_cost.json").read_text()) == times


def test_times_for_fewer_heads_than_are_asked_for_are_taken_again(tiny_run: Path) -> None:
    words = ["--run", str(tiny_run), "--budget", "auto"]
    assert medusa_tree(*words, "--heads", "2").exit_code == 0
    all_heads = medusa_tree(*words)
    assert all_heads.exit_code == 0 and "step times from" not in all_heads.stderr
    times = json.loads((tiny_run / "step_cost.json").read_text())["costs"]
    assert max(row["heads"] for row in times) == 3
    fewer = medusa_tree(*words, "--heads", "2", "--json")
    assert "step times from" in fewer.stderr
    assert len(json.loads(fewer.stdout)["nodes_per_depth"]) <= 3


def test_a_budget_that_is_no_number_is_refused(tiny_run: Path) -> None:
    done = medusa_tree("--run", str(tiny_run), "--budget", "many")
    assert done.exit_code == 2 and "--budget 'many' is no number of nodes" in done.stderr
    done = medusa_tree("--calibration", str(tiny_run / "calibration.json"), "--budget", "auto")
    assert done.exit_code == 1 and "needs a drafter to time" in done.stderr
