"""The curve of what a model's change buys: one point a run, gains in pairs, and nothing where no model moved."""

from typing import Any

import pytest

from medusa_cli.benchmarks.charts import Point, scatter
from medusa_cli.benchmarks.pieces import SavedBench
from medusa_cli.benchmarks.trade_off import trade_off


def source(
    name: str, kl: float | None, accepted: int, full: bool = False, logged: bool = True, **backbone: str
) -> SavedBench:
    """A bench of four questions of ten steps each, beside a training that moved its model so far."""
    answers = [
        {"question": str(n), "steps": 10, "accepted": accepted + n, "tokens": 20, "seconds": 1.0} for n in range(4)
    ]
    rate = 1 + sum(one["accepted"] for one in answers) / 40
    plain: dict[str, Any] = {"acceptance_rate": 1.0, "questions": 4, "answers": []}
    parts = {"nll": 2.0} if full else {} if kl is None else {"nll": 2.0, "kl": kl}
    log = [{"event": "validated", "parts": {"kl": 9.0}}, {"event": "stepped"}, {"event": "validated", "parts": parts}]
    methods = {"ar": plain, "medusa": {"acceptance_rate": rate, "questions": 4, "answers": answers}}
    document = {"methods": methods, "baseline": "ar", "backbone": {"id": "model", "weights": "original", **backbone}}
    return SavedBench(name, document, training=log if logged else ())


def test_every_run_is_a_point_and_is_held_against_the_frozen_models_heads() -> None:
    section = trade_off([source("frozen", None, 10), source("near", 0.03, 12), source("far", 0.2, 18)])
    assert section is not None
    rows = section.tables[0].rows
    assert [row[:2] for row in rows] == [["frozen", "0.0000"], ["near", "0.0300"], ["far", "0.2000"]]
    assert rows[0][3] == "-" and float(rows[1][3].split()[0]) == pytest.approx(2.35 / 2.15, abs=0.01)
    assert rows[2][3].startswith("1.37 (") and "over frozen" in section.tables[0].head[3]
    assert section.charts[0].svg.count("<svg") == 1 and "4 questions" in section.charts[0].svg
    assert "times those of frozen" in section.charts[0].svg
    without = trade_off([source("near", 0.03, 12), source("far", 0.2, 18)])
    assert without is not None and "tokens a step" in without.charts[0].svg and "times" not in without.charts[0].svg


def test_the_gain_is_over_the_questions_that_both_answered() -> None:
    base, moved = source("frozen", None, 10), source("near", 0.03, 12)
    kept = moved.methods["medusa"]["answers"]
    kept[:] = kept[:0:-1]  # all but the first, in another order
    section = trade_off([base, moved])
    assert section is not None
    ratio, *interval = section.tables[0].rows[1][3].replace("(", "").replace(")", "").split()
    assert float(ratio) == pytest.approx((30 + 13 + 14 + 15) / (30 + 11 + 12 + 13), abs=0.01)
    assert float(interval[0]) <= float(ratio) <= float(interval[2])
    kept[:] = [{**one, "question": "other"} for one in kept]
    section = trade_off([base, moved])
    assert section is not None and section.tables[0].rows[1][3] == "-"


def test_heads_without_a_log_stand_on_the_original_that_others_moved() -> None:
    shipped, moved = source("shipped", None, 10, logged=False), source("near", 0.03, 12, adapter="one")
    section = trade_off([shipped, moved])
    assert section is not None and [row[:2] for row in section.tables[0].rows][0] == ["shipped", "0.0000"]
    assert "over shipped" in section.tables[0].head[3]
    # Of another model, or with an adapter of which nothing is known, it says nothing.
    for other in ({"weights": "another"}, {"adapter": "another"}):
        assert trade_off([source("shipped", None, 10, logged=False, **other), moved]) is None


def test_without_a_model_that_moved_there_is_no_curve() -> None:
    assert trade_off([source("one", None, 10), source("two", None, 12)]) is None
    assert trade_off([source("one", 0.1, 10)]) is None
    # One trained in full keeps no original: nothing tells how far it moved.
    assert trade_off([source("frozen", None, 10), source("full", None, 12, full=True)]) is None


def test_an_interval_is_drawn_as_a_whisker_with_two_caps() -> None:
    def lines(*points: Point) -> int:
        return scatter({"one": points}, "across", "up", "title", ["one"]).count("<use") - ticks

    # The axes' ends are the same in all three, and so are their ticks.
    ends = (Point(1, 0), Point(3, 4))
    ticks = 0
    ticks = lines(*ends, Point(2, 2)) - 3
    assert lines(*ends, Point(2, 2, (1.5, 2.25))) == 3 + 2
    assert lines(*ends, Point(2, 2, (2.5, 3.5))) == 3 + 2, "nor is one forgotten that misses its point"
