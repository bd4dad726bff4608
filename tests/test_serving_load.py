"""`make bench-serve` asks all ways the same, and says what a server that fails said."""

from pathlib import Path

import pytest

from medusa_cli.api import Medusa
from medusa_cli.benchmarks.servers import ask, started
from medusa_cli.benchmarks.ways import Way, in_turns, standings, whole_answers
from medusa_cli.errors import UserError
from tests.runs import save_model, save_run
from tests.serving import MODEL, serving


class Recorded(Way):
    """A way that answers at once; questions of so many letters get answers of so many tokens."""

    def __init__(self, name: str, clients: int = 1) -> None:
        self.asked: list[str] = []
        super().__init__(name, lambda question: self.asked.append(question) or len(question), clients)


def test_all_ways_get_the_same_questions_whatever_their_turn() -> None:
    ways = [Recorded("chat"), Recorded("serve"), Recorded("serve", 3)]
    questions = ["a", "bb", "ccc"]
    in_turns(ways, questions)
    assert [sorted(way.asked) for way in ways] == [questions] * 3
    assert [len(way.loads) for way in ways] == [3, 3, 1]  # those of many clients are timed as a whole
    assert ways[2].loads[0][0] == 6


def test_answers_that_end_before_the_limit_are_left_out() -> None:
    asked = ["x" * n for n in (4, 2, 4, 3, 4)]
    assert whole_answers(Recorded("chat"), asked, 2, 4) == ["xxxx"] * 2
    with pytest.raises(UserError, match="only 3 answers have 4 tokens"):
        whole_answers(Recorded("chat"), asked, 4, 4)


def test_each_way_is_held_against_the_first() -> None:
    chat, serve, many = (Way(name, len, clients) for name, clients in (("chat", 1), ("serve", 1), ("serve", 8)))
    chat.loads, serve.loads = [(10, 1.0), (10, 1.0), (10, 1.0)], [(10, 2.0), (10, 1.0), (10, 1.25)]
    many.loads = [(90, 2.0)]
    rows = standings([chat, serve, many])
    assert [row.over_the_first for row in rows] == [1.0, 0.8, 4.5]
    assert [row.tokens_per_s for row in rows] == [10.0, 7.06, 45.0]


def test_a_server_is_asked_and_its_refusal_said(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    with serving(Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32")) as server:
        assert 1 <= ask(server.port, MODEL, "w1 w2", 7) <= 7
        with pytest.raises(UserError, match="the server answered 404"):
            ask(server.port, "another", "w1 w2", 7)


def test_a_server_that_does_not_start_says_why() -> None:
    said = "no_such_server` does not start: .*No module named no_such_server"
    with pytest.raises(UserError, match=said), started(("no_such_server",), [], "install it"):
        pass
