"""`medusa bench`: figures by hand, identity, reports, questions, batches, refusals."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch

from medusa_cli.backbone.network import load_network
from medusa_cli.benchmarks import Answers, Question, measure, read_questions, spread, summarise
from medusa_cli.benchmarks import Result as Measured
from medusa_cli.benchmarks.continuation import Continuation
from medusa_cli.benchmarks.questions import of_categories
from medusa_cli.benchmarks.tally import Tally
from medusa_cli.decoding import Step
from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import Tree
from medusa_cli.tree.saved import save_tree
from tests import passes
from tests.benches import bench, medusa, save_bench
from tests.runs import save_model, save_run
from tests.tiny import tiny_backbone


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("bench"))


def test_every_method_answers_alike_and_the_document_says_so(place: Path) -> None:
    shown = bench(place, "--json", "--tree", "static")
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["baseline"] == "hf" and set(document["methods"]) == {"hf", "ar", "medusa"}
    for one in document["methods"].values():
        assert one["identical"] == one["questions"] == 4
        assert one["tokens"] == document["methods"]["hf"]["tokens"] > 0
        assert set(one["per_category"]) == {"a", "b"} and one["tokens_per_s"] > 0
        assert one["divergences"] == []
    assert document["methods"]["hf"]["speedup"] == pytest.approx(1)
    assert document["methods"]["ar"]["overhead"] == pytest.approx(1)
    assert document["methods"]["medusa"]["acceptance_rate"] >= 1
    drafted = document["drafting"]["medusa"]
    assert (drafted["kind"], drafted["nodes"], drafted["dynamic"]) == ("medusa", 6, False)
    assert drafted["drafter"] == str(place / "mine" / "drafter") and drafted["tree"] == str(place / "mine/tree.json")
    reports = list((place / "mine" / "bench").glob("*.md"))
    page = reports[0].read_text()
    assert "| medusa |" in page and "| drafting |" in page and "Acceptance rate by category" in page
    alone = json.loads(bench(place, "--json", "--category", "b", "--methods", "ar,medusa").stdout)
    assert set(alone["methods"]["medusa"]["per_category"]) == {"b"} and alone["methods"]["ar"]["questions"] == 2


def test_the_table_names_methods_categories_and_skipped_lines(place: Path) -> None:
    shown = bench(place, "--limit", "2", "--methods", "ar,medusa")
    assert shown.exit_code == 0
    assert "over ar" in shown.stdout and "reference" in shown.stdout and "2/2" in shown.stdout
    assert "1 records are no questions" in shown.stderr


def test_80_columns_hold_the_table_whole(place: Path) -> None:
    shown = bench(place, "--limit", "2", "--methods", "ar,medusa,medusa-dynamic").stdout
    assert max(len(line) for line in shown.splitlines() if not line.startswith("report:")) <= 80 and "…" not in shown
    assert "┓" in shown.splitlines()[1] and "dynamictreesofatmost" in "".join(shown.split())


def test_sampling_reports_no_identity(place: Path) -> None:
    shown = bench(place, "--json", "--temperature", "0.8", "--limit", "1", "--methods", "ar,medusa")
    document = json.loads(shown.stdout)
    assert document["sampling"]["mode"] == "exact" and document["methods"]["medusa"]["identical"] is None


def test_a_difference_is_found_with_its_margin() -> None:
    backbone = tiny_backbone()
    good = lambda prompts, count, watch: [Continuation([9, 10, 11][:count], 1.0, None)]  # noqa: E731
    odd = lambda prompts, count, watch: [Continuation([9, 12, 11][:count], 1.0, None)]  # noqa: E731
    question = Question("q", "c", ("w1",))
    (result,) = measure(backbone, {"ar": good, "medusa": odd}, [question], 3)
    found = result.answers["medusa"].divergence
    assert (found.turn, found.position, found.expected, found.actual) == (0, 1, 10, 12)
    ids = torch.tensor([*backbone.encode_chat([{"role": "user", "content": "w1"}]), 9])
    scores = passes.run(backbone, ids).logits[-1]
    assert found.margin == pytest.approx(float(scores[10] - scores[12]), abs=1e-4)
    assert summarise([result])["methods"]["medusa"]["identical"] == 0


def test_all_methods_see_the_references_history() -> None:
    backbone = tiny_backbone()
    prompts: dict[str, list] = {"ar": [], "medusa": []}

    def method(name: str, answer: list[int]):
        return lambda asked, count, watch: prompts[name].extend(asked) or [Continuation(answer, 1.0, None)] * len(asked)

    question = Question("q", "c", ("w1", "w2"))
    list(measure(backbone, {"medusa": method("medusa", [9]), "ar": method("ar", [10])}, [question], 3))
    assert prompts["ar"] == prompts["medusa"]


def test_answers_of_before_are_the_history_and_are_compared_with_the_others() -> None:
    backbone, prompts = tiny_backbone(), list[list[int]]()

    def method(answer: list[int]):
        return lambda asked, count, watch: prompts.extend(asked) or [Continuation(answer, 1.0, None)] * len(asked)

    question = Question("q", "c", ("w1", "w2"))
    known = list(measure(backbone, {"hf": method([9])}, [question], 3, compare=False))
    before, prompts[:] = prompts[1:], []
    (result,) = measure(backbone, {"ar": method([10]), "medusa": method([10])}, [question], 3, known=known)
    assert prompts[2:] == [before[0], before[0], before[1], before[1]]  # the first of each warm up
    assert list(result.answers) == ["hf", "ar", "medusa"] and result.answers["medusa"].divergence is None
    assert result.answers["hf"].divergence is not None and known[0].answers["hf"].turns == [[9], [9]]


@pytest.mark.parametrize("words", ["bench --questions q.jsonl --limit 1", "demo --limit 1", "bench --steps"])
def test_the_models_weights_are_held_once(place: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    held: list[int] = []
    networks: list[weakref.ref] = []

    def counted(*args, **rest):
        held.append(sum(one() is not None for one in networks))
        network, tokenizer = load_network(*args, **rest)
        networks.append(weakref.ref(network))
        return network, tokenizer

    monkeypatch.chdir(place)
    monkeypatch.setattr("medusa_cli.assets.mt_bench_path", lambda: place / "q.jsonl")
    for user in ("medusa_cli.benchmarks.baseline", "medusa_cli.engines.load"):
        monkeypatch.setattr(f"{user}.load_network", counted)
    short = ["--context", "9"] if "--steps" in words else ["--max-new-tokens", "2"]
    shown = medusa(*words.split(), "--run", str(place / "mine"), "--dtype", "fp32", *short)
    assert shown.exit_code == 0, shown.stderr
    assert held == [0, 0]


def test_a_penalty_that_the_model_comes_with_is_no_methods(place: Path, tmp_path: Path) -> None:
    model = shutil.copytree(place / "model", tmp_path / "model")
    rules = json.loads((model / "generation_config.json").read_text())
    rules |= {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_new_tokens": 9}
    (model / "generation_config.json").write_text(json.dumps(rules))
    shown = bench(place, "--model", str(model), "--methods", "hf,ar", "--limit", "2", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["methods"]["hf"]["identical"] == 2


@pytest.mark.parametrize(("named", "kept"), [(".", "x1"), ("../mine", "mine")])
def test_a_bench_is_kept_under_the_models_folder_or_a_link_to_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, kept: str
) -> None:
    monkeypatch.chdir(shutil.copytree(place / "model", tmp_path / "x1"))
    (tmp_path / "mine").symlink_to(tmp_path / "x1")
    heads = ["--drafter", str(place / "mine/drafter"), "--tree", str(place / "mine/tree.json"), "--dtype", "fp32"]
    words = ["--questions", str(place / "q.jsonl"), "--limit", "1", "--max-new-tokens", "2", "--methods", "ar,medusa"]
    shown = medusa("bench", "--model", named, *heads, *words)
    assert shown.exit_code == 0, shown.stderr
    assert [path.name for path in Path("runs").iterdir()] == [kept]


def test_a_question_longer_than_the_context_is_named_before_anything_is_measured() -> None:
    backbone, ran = tiny_backbone(positions=24), list[int]()
    ran_by = lambda prompts, count, watch: ran.append(count) or [Continuation([9] * count, 1.0, None)] * len(prompts)  # noqa: E731
    questions = [Question("short", "c", ("w1",)), Question("long", "c", ("w1 " * 40,))]
    with pytest.raises(UserError, match="question 'long' has .* tokens, 'tiny-llama' has a context of 24"):
        list(measure(backbone, {"ar": ran_by}, questions, 3))
    assert not ran


def test_a_turn_that_answers_make_longer_than_the_context_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    backbone = tiny_backbone(positions=24)
    wordy = lambda prompts, count, watch: [Continuation([9] * count, 1.0, None)] * len(prompts)  # noqa: E731
    questions = [Question("q", "c", ("w1", "w2", "w3")), Question("p", "c", ("w1",))]
    for batch_size in (1, 2):
        results = list(measure(backbone, {"ar": wordy, "medusa": wordy}, questions, 20, batch_size=batch_size))
        assert [len(one.answers["medusa"].turns) for one in results] == [1, 1]
        assert caplog.text.count("turn 2 of question 'q' has") == 1
        known = list(measure(backbone, {"ar": wordy}, questions, 20, batch_size=batch_size, known=results))
        assert [len(one.answers["ar"].turns) for one in known] == [1, 1]
        assert caplog.text.count("turn 2 of question 'q' has") == 1
        caplog.clear()


def test_questions_side_by_side_keep_their_own_histories_and_turns() -> None:
    backbone = tiny_backbone()
    calls: list[list[list[int]]] = []

    def method(prompts, count, watch):
        calls.append(prompts)
        return [Continuation([9 + len(calls)] * (i + 1), 0.5, None) for i in range(len(prompts))]

    questions = [Question("a", "c", ("w1", "w2")), Question("b", "c", ("w3",)), Question("d", "c", ("w4", "w5"))]
    results = list(measure(backbone, {"ar": method}, questions, 3, batch_size=2))
    assert [result.question.id for result in results] == ["a", "b", "d"]
    assert [len(result.answers["ar"].turns) for result in results] == [2, 1, 2]
    assert [len(prompts) for prompts in calls] == [2, 2, 1, 1, 1]  # the first call warms up
    history = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": backbone.decode(results[0].answers["ar"].turns[0])},
        {"role": "user", "content": "w2"},
    ]
    assert calls[2] == [backbone.encode_chat(history)]


def test_a_batch_answers_as_one_at_a_time_does_and_says_its_size(place: Path) -> None:
    alone = json.loads(bench(place, "--json", "--tree", "static").stdout)
    shown = bench(place, "--json", "--tree", "static", "--batch-size", "3")
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert (alone["batch_size"], document["batch_size"]) == (1, 3)
    assert "3 questions side by side" in document["facts"][-1]
    for name, one in document["methods"].items():
        assert one["identical"] == one["questions"] == 4 and one["divergences"] == []
        assert one["tokens"] == alone["methods"][name]["tokens"]
        assert one["acceptance_rate"] == pytest.approx(alone["methods"][name]["acceptance_rate"])
    assert document["methods"]["ar"]["overhead"] == pytest.approx(1)


@pytest.mark.parametrize("method", ["hf-lookup", "llama.cpp"])
def test_what_decodes_one_sequence_alone_is_no_batch_method(place: Path, method: str) -> None:
    shown = bench(place, "--batch-size", "2", "--methods", f"ar,{method}")
    assert shown.exit_code == 2 and f"--methods {method} decodes one sequence at a time" in shown.stderr


def test_dynamic_trees_grow_side_by_side_too(place: Path) -> None:
    words = ["--json", "--methods", "ar,medusa-dynamic", "--batch-size"]
    together, alone = (json.loads(bench(place, *words, size).stdout)["methods"] for size in ("2", "1"))
    grown = together["medusa-dynamic"]
    assert grown["identical"] == grown["questions"] == 4
    assert grown["acceptance_rate"] == pytest.approx(alone["medusa-dynamic"]["acceptance_rate"])


def test_figures_follow_from_tokens_and_seconds() -> None:
    def stats(steps: int, accepted: int, seconds: float) -> Tally:
        return Tally.of(Step([1] * 2, 5, accepted, 0.0, seconds) for _ in range(steps))

    answers = {
        "hf": Answers([[1] * 20], 2.0),
        "ar": Answers([[1] * 20], 1.0, stats(20, 0, 0.05)),
        "medusa": Answers([[1] * 20], 0.5, stats(10, 1, 0.06)),
    }
    methods = summarise([Measured(Question("1", "c", ("x",)), answers)])["methods"]
    assert methods["ar"]["speedup"] == pytest.approx(2) and methods["medusa"]["speedup"] == pytest.approx(4)
    assert methods["medusa"]["acceptance_rate"] == pytest.approx(2)
    assert methods["medusa"]["overhead"] == pytest.approx(1.2) and methods["hf"]["overhead"] is None


def test_categories_are_chosen_by_name() -> None:
    questions = [Question(str(i), "abc"[i % 3], ("x",)) for i in range(9)]
    assert of_categories(questions, None) == questions
    assert {q.category for q in of_categories(questions, "a, c")} == {"a", "c"}
    with pytest.raises(UsageError, match="'math' is none of these questions'; use some of a, b, c"):
        of_categories(questions, "math")


def test_limits_are_spread_over_the_categories() -> None:
    questions = [Question(str(i), "abc"[i // 4], ("x",)) for i in range(12)]
    assert [q.category for q in spread(questions, 3)] == ["a", "b", "c"]
    assert len(spread(questions, 5)) == 5 and spread(questions, None) == questions
    with pytest.raises(UsageError, match="limit 0"):
        spread(questions, 0)
    same = [Question("1", "c", (f"w{i}",)) for i in range(4)]
    assert spread(same, 2) == same[:2]  # whatever the ids


def test_a_question_ends_with_its_line_whatever_it_holds(tmp_path: Path) -> None:
    odd = "first\u2028second\x85third"
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": [odd]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [question.turns for question in read_questions(tmp_path / "q.jsonl")[0]] == [(odd,)]


@pytest.mark.parametrize("text", ["", "not json\n", '{"turns": []}\n', '{"turns": [3]}\n', "[1]\n"])
def test_files_without_questions_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(UserError, match="no usable question"):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--methods", "hf,magic"], 2, "'magic' is unknown"),
        (["--mt-bench"], 2, "exclude each other"),
        (["--limit", "0"], 2, "--limit 0"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--top-p", "2"], 2, "--top-p"),
        (["--questions", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["--run", "nowhere"], 1, "nowhere"),
        (["--drafter", "nowhere"], 1, "nowhere"),
        (
            ["--tree", "dynamc"],
            1,
            "--tree 'dynamc' is no file; use auto, static, static:N, dynamic, dynamic:N or a file",
        ),
        (["--device", "tpu"], 2, "tpu"),
    ],
)
def test_mistakes_end_in_one_line(place: Path, words: list[str], code: int, part: str) -> None:
    shown = bench(place, *words)
    assert shown.exit_code == code and part in shown.stderr and "Traceback" not in shown.stderr
    assert sum(line.startswith("error:") for line in shown.stderr.splitlines()) == 1


def test_a_tree_deeper_than_the_heads_and_another_model_are_refused(place: Path, tmp_path: Path) -> None:
    save_tree(tmp_path / "deep.json", Tree.chain(5), {})
    shown = bench(place, "--tree", str(tmp_path / "deep.json"))
    assert shown.exit_code == 1 and "5 deep, the drafter has 3 heads" in shown.stderr
    other = save_model(tmp_path / "other", seed=9)
    shown = bench(place, "--model", other)
    assert shown.exit_code == 1 and "was made for the model" in shown.stderr


def test_files_of_the_wrong_shape_are_named(place: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "mine", str(place / "model"), calibrated=True, heads=2, tree=Tree.chain(2))
    words = ["--run", str(run.path), "--methods", "ar,medusa", "--limit", "1"]
    deep = json.loads(run.calibration_path.read_text())["accuracies"] * 2
    run.calibration_path.write_text(json.dumps({"accuracies": deep}))
    shown = bench(place, *words, "--tree", "static:40")
    assert shown.exit_code == 1 and "the tree static:40 is" in shown.stderr, shown.stderr
    run.calibration_path.write_text(json.dumps({"accuracies": deep, "temperatures": ["warm"]}))
    shown = bench(place, *words, "--tree", "dynamic")
    assert shown.exit_code == 1 and "expected float, got str at temperatures[0]" in shown.stderr
    (run.drafter_dir / "config.json").write_text("[1]")
    for methods in ("ar,medusa", "ar,medusa,hydra"):
        shown = bench(place, *words, "--methods", methods)
        assert shown.exit_code == 1 and "config.json holds no JSON object" in shown.stderr, shown.stderr
