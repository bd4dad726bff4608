"""Questions: the forms of published sets, by file and hub id; choice by category and number."""

import json
from pathlib import Path

import pytest

from medusa_cli.bench.answers import _add_prompt
from medusa_cli.bench.questions import (
    CODING,
    WITHHELD,
    Question,
    of_categories,
    read_questions,
    spread,
)
from medusa_cli.bench.stats import Result
from medusa_cli.errors import UsageError, UserError
from tests.helpers import tiny_backbone, write_lines


def test_spec_benchs_480_questions_are_six_tasks(tmp_path: Path) -> None:
    def categories(*names: str) -> list[str]:
        path = write_lines(
            tmp_path / "q.jsonl", [{"category": name, "turns": ["x"]} for name in names]
        )
        questions, skipped = read_questions(path)
        assert skipped == 0
        return [question.category for question in questions]

    tasks = ("translation", "summarization", "qa", "math_reasoning", "rag")
    assert categories("writing", "stem", *tasks) == ["mt_bench", "mt_bench", *tasks]
    # Without the other five tasks MT-Bench's categories stay as they are.
    assert categories("writing", "qa") == ["writing", "qa"]


def test_speed_benchs_rows_are_read_and_withheld_ones_skipped(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "question_id": "a1",
            "category": "coding",
            "turns": ["first", "second"],
            "multiturn": True,
        },
        {
            "question_id": "a2",
            "category": "math",
            "turns": [f"{WITHHELD} FROM THE SOURCE"],
            "multiturn": False,
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    assert read_questions(tmp_path / "test.parquet") == (
        [Question("a1", "coding", ("first", "second"))],
        1,
    )
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(UserError, match="no.parquet"):
        read_questions(tmp_path / "no.parquet")


@pytest.mark.parametrize(
    ("record", "turns", "reference"),
    [
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  1"},
            ("def f():",),
            ("  1",),
        ),
        ({"question": "2 + 2?", "answer": "#### 4"}, ("2 + 2?",), ("#### 4",)),
        ({"instruction": "Translate.", "input": "Hallo"}, ("Translate.\n\nHallo",), ()),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            ("u",),
            (),
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ("a",),
            (),
        ),
        ({"turns": ["a", "b"], "reference": ["c", "d"]}, ("a", "b"), ("c", "d")),
        # Only \n ends a line.
        (
            {"turns": ["first\u2028second\x85third"]},
            ("first\u2028second\x85third",),
            (),
        ),
    ],
)
def test_records_of_other_sets_are_questions(
    tmp_path: Path, record: dict, turns: tuple, reference: tuple
) -> None:
    (tmp_path / "q.jsonl").write_text(
        json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    ([question], _) = read_questions(tmp_path / "q.jsonl")
    assert (question.turns, question.reference) == (turns, reference)
    (tmp_path / "q.json").write_text(json.dumps([record, 3]))
    assert read_questions(tmp_path / "q.json") == ([question], 1)


def test_questions_with_one_id_are_told_apart(tmp_path: Path) -> None:
    records = [{"id": 7, "prompt": text} for text in ("a", "b")] + [{"id": 8, "prompt": "c"}]
    questions, skipped = read_questions(write_lines(tmp_path / "q.jsonl", records))
    assert [question.turns for question in questions] == [("a",), ("b",), ("c",)]
    assert len({question.id for question in questions}) == 3
    assert skipped == 0
    assert (questions[0].id, questions[2].id) == ("7", "8")


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("one\n\ntwo \n")
    assert [question.turns for question in read_questions(tmp_path / "q.txt")[0]] == [
        ("one",),
        ("two",),
    ]


def test_a_hub_datasets_split_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    splits = {"train": [{"question": "t"}], "test": [{"question": "e"}]}
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *words, trust_remote_code: asked.append((*words, trust_remote_code)) or splits,
    )
    monkeypatch.setattr("medusa_cli.files.hub.check_hub", lambda *words, **more: None)
    assert read_questions("openai/gsm8k:main")[0][0].turns == ("e",)
    assert read_questions("openai/gsm8k:main:train")[0][0].turns == ("t",)
    assert asked == [("openai/gsm8k", "main", False)] * 2
    with pytest.raises(UserError, match="'dev'"):
        read_questions("openai/gsm8k:main:dev")
    monkeypatch.setattr("datasets.load_dataset", lambda *words, **more: 1 / 0)
    with pytest.raises(UserError, match="a/b"):
        read_questions("a/b")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "a/b/c", "words"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="questions"):
        read_questions(name)


@pytest.mark.parametrize("text", ["", "not json\n", '{"turns": []}\n', '{"turns": [3]}\n', "[1]\n"])
def test_files_without_questions_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(UserError, match="questions"):
        read_questions(tmp_path / "q.jsonl")


def test_questions_are_chosen_by_category_and_spread_over_them() -> None:
    questions = [Question(str(i), "abc"[i // 4], ("x",)) for i in range(12)]
    assert of_categories(questions, None) == spread(questions, None) == questions
    assert {question.category for question in of_categories(questions, "a, c")} == {"a", "c"}
    assert [question.category for question in spread(questions, 3)] == ["a", "b", "c"]
    assert len(spread(questions, 5)) == 5
    same = [Question("1", "c", (f"w{i}",)) for i in range(4)]
    assert spread(same, 2) == same[:2]  # whatever the ids
    with pytest.raises(UsageError, match="category 'math'"):
        of_categories(questions, "math")


def test_our_questions_about_code_are_forty_of_two_turns() -> None:
    questions, skipped = read_questions(CODING)
    assert (len(questions), skipped) == (40, 0)
    assert (
        len({question.id for question in questions})
        == len({question.turns[0] for question in questions})
        == 40
    )
    assert all(len(question.turns) == 2 for question in questions)
    assert len({question.category for question in questions}) == 8


def test_a_system_prompt_is_asked_with_its_question(tmp_path: Path) -> None:
    user = {"role": "user", "content": "w1"}
    system = {"role": "system", "content": "w40"}
    records = [
        {"messages": [system, user]},
        {"messages": [user], "system": "w40"},
        {"prompt": "w1", "system_prompt": "w40"},
        {"prompt": "w1", "system": ""},
        {"messages": [user, system, user]},
        {"prompt": "w1", "system": 7},
    ]
    questions, skipped = read_questions(write_lines(tmp_path / "q.jsonl", records))
    assert [question.system for question in questions] == ["w40", "w40", "w40", None]
    assert skipped == 2
    result = Result(questions[0])
    backbone = tiny_backbone()
    _add_prompt(backbone, result, 0, "ar")
    assert result.prompts == [backbone.encode_chat([system, user])]
