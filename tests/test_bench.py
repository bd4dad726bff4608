"""`medusa bench` and `medusa demo`: figures by hand, identity, histories, batches, every method, refusals."""

import io
import json
import shutil
import socketserver
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.text import Text

from medusa_cli import console
from medusa_cli.api import Medusa
from medusa_cli.bench import bench as running
from medusa_cli.bench import questions
from medusa_cli.bench.answers import answer_all, first_difference
from medusa_cli.bench.bench import save
from medusa_cli.bench.methods import Method
from medusa_cli.bench.peers import check_reader, server_method
from medusa_cli.bench.questions import Question
from medusa_cli.bench.report import gains_table, parts_table
from medusa_cli.bench.stats import (
    Measurement,
    Result,
    _rates,
    bootstrap,
    by_position,
    rate,
    ratio_of_rates,
    summarize,
)
from medusa_cli.commands import demo
from medusa_cli.decode import Piece, Sampling, Step
from medusa_cli.drafters import HydraHeads
from medusa_cli.engine import load as engine_load
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model.load import load_network
from medusa_cli.tree import Tree
from medusa_cli.tree.io import save_tree
from tests import helpers
from tests.bench import papers
from tests.helpers import (
    TREE,
    TokenServer,
    bench,
    medusa,
    save_bench,
    save_model,
    save_run,
    tiny_backbone,
)
from tests.serving import serving


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("bench"))


def bench_json(place: Path, *words: str) -> dict:
    return json.loads(bench(place, "--json", *words).stdout)


def refused(place: Path, code: int, part: str, *words: str) -> None:
    assert part in bench(place, *words, exit_code=code).stderr, words


def method(answer: Callable[[int], list[int]], prompts: list | None = None) -> Method:
    """Returns a method that answers with `answer(count)`, and keeps the prompts."""

    def answers(
        asked: Sequence[Sequence[int]], count: int, on_tokens: Callable
    ) -> list[Measurement]:
        if prompts is not None:
            prompts.extend(asked)
        return [Measurement([answer(count)]) for _ in asked]

    return answers


def measure(
    backbone: Backbone, methods: dict[str, Method], results: list[Result], count: int, size: int = 1
) -> None:
    answer_all(backbone, methods, results, count, size)


def ask(*turns: str) -> Result:
    return Result(Question("q", "c", turns))


# Figures


def test_figures_follow_from_tokens_and_seconds() -> None:
    answers = {
        "hf": Measurement([[1] * 20], 2.0),
        "ar": Measurement([[1] * 20], 1.0),
        "medusa": Measurement([[1] * 20], 0.5),
    }
    for name, steps, accepted, seconds in (("ar", 20, 0, 0.05), ("medusa", 10, 1, 0.06)):
        for _ in range(steps):
            answers[name].stats.add(Step([1] * (1 + accepted), 6, (0,), verify_s=seconds))
    document = summarize([Result(Question("1", "c", ("x",)), [[1]], answers)], None)
    methods = document["methods"]
    assert (document["baseline"], document["reference"]) == ("hf", "ar")
    assert methods["ar"]["speedup"] == pytest.approx(2)
    assert methods["medusa"]["speedup"] == pytest.approx(4)
    assert methods["medusa"]["acceptance_length"] == pytest.approx(2)
    assert methods["medusa"]["overhead"] == pytest.approx(1.2)
    assert methods["hf"]["overhead"] is None


def test_prompts_and_generation_are_told_apart() -> None:
    def answered(seconds: float, *first: float) -> Measurement:
        return Measurement([[1] * 11, [1] * 11], seconds, first_token_s=list(first))

    answers = {
        "ar": answered(4.0, 0.5, 1.5),
        "medusa": answered(3.0, 0.5, 1.5),
        "whole": answered(3.0),
    }
    results = [Result(Question("1", "c", ("x", "y")), [[1], [1]], answers)]
    methods = summarize(results, None)["methods"]
    assert methods["ar"]["first_token_s"] == pytest.approx(1.0)
    assert methods["ar"]["generation_per_s"] == pytest.approx(20 / 2)
    assert methods["medusa"]["generation_speedup"] == pytest.approx(2)
    assert methods["whole"]["first_token_s"] is None
    assert methods["whole"]["generation_speedup"] is None
    document = {"baseline": "ar", "methods": methods}
    assert [row[0] for row in parts_table(document)[1]] == ["ar", "medusa"]


@pytest.mark.slow
def test_the_first_token_of_each_turn_is_timed() -> None:
    def slow(asked: Sequence, count: int, on_tokens: Callable) -> list[Measurement]:
        time.sleep(0.05)
        on_tokens([1])
        time.sleep(0.1)
        on_tokens([2, 3])
        return [Measurement([[1, 2, 3]])]

    results = [ask("w1 w2", "w3")]
    measure(tiny_backbone(), {"slow": slow}, results, 3)
    answer = results[0].answers["slow"]
    assert len(answer.first_token_s) == 2
    assert 0.1 <= sum(answer.first_token_s) < answer.seconds - 0.15


@pytest.mark.slow
def test_an_interval_holds_the_figure_and_narrows_with_more_questions() -> None:
    draws = torch.Generator().manual_seed(4)
    values = [10 + torch.randn(count, generator=draws, dtype=torch.float64) for count in (8, 800)]
    wide, narrow = (bootstrap([[float(value), 1.0] for value in part], rate) for part in values)
    assert wide is not None
    assert narrow is not None
    assert narrow[0] < 10 < narrow[1]
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])
    # 1.96 standard errors to either side.
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.96 / 800**0.5, rel=0.15)
    assert bootstrap([[1.0, 2.0]], rate) is None
    # A ratio of two methods is drawn in pairs: the first takes half the time of the second, whatever the question.
    columns = [[tokens, tokens / 10, tokens, tokens / 5] for tokens in (1.0, 50.0, 400.0, 3.0)]
    assert bootstrap(columns, ratio_of_rates) == pytest.approx((2.0, 2.0))


def test_positions_are_counted_from_paths() -> None:
    answer = Measurement([[]])
    answer.add(Step([1], verify_s=0.1))
    for path in ((0, 1, 3), (0, 1), (0, 2), (0, 1), (0,)):
        answer.add(Step([1], path=path))
    first, second = by_position([answer.depths])
    assert (first["reached"], first["after"]) == (4 / 5, 4 / 5)
    assert (second["reached"], second["after"]) == (1 / 5, 1 / 4)
    assert by_position([{0: 3}]) == by_position([{}]) == []


# Identity and histories


def test_a_difference_is_found_with_its_margin() -> None:
    backbone, result = tiny_backbone(), ask("w1")
    methods = {"ar": method(lambda n: [9, 10, 11][:n]), "medusa": method(lambda n: [9, 12, 11][:n])}
    measure(backbone, methods, [result], 3)
    difference = first_difference(backbone, result, "medusa", "ar")
    assert difference is not None
    assert (difference["turn"], difference["position"]) == (0, 1)
    assert (difference["expected"], difference["actual"]) == (10, 12)
    logits = helpers.forward(backbone, torch.tensor([*result.prompts[0], 9])).logits[-1]
    assert difference["margin"] == pytest.approx(float(logits[10] - logits[12]), abs=1e-4)
    assert (
        summarize([result], {"ar": [], "medusa": [difference]})["methods"]["medusa"]["identical"]
        == 0
    )
    assert first_difference(backbone, result, "ar", "ar") is None


def test_all_methods_see_the_references_history() -> None:
    prompts: dict[str, list] = {"ar": [], "medusa": [], "hf": []}
    backbone, result = tiny_backbone(), ask("w1", "w2")
    measure(backbone, {"hf": method(lambda n: [9], prompts["hf"])}, [result], 3)
    pair = {
        "medusa": method(lambda n: [10], prompts["medusa"]),
        "ar": method(lambda n: [11], prompts["ar"]),
    }
    measure(backbone, pair, [result], 3)  # earlier methods fixed the history
    # The first is the warm-up.
    assert prompts["ar"] == prompts["medusa"] == prompts["hf"]
    assert len(prompts["ar"]) == 3
    assert list(result.answers) == ["hf", "medusa", "ar"]
    assert result.answers["hf"].turns == [
        [9],
        [9],
    ]
    history = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": backbone.decode([9])},
    ]
    assert result.prompts[1] == backbone.encode_chat([*history, {"role": "user", "content": "w2"}])


def test_questions_in_a_batch_keep_their_own_histories_and_turns() -> None:
    calls: list = []

    def numbered(
        prompts: Sequence[Sequence[int]], count: int, on_tokens: Callable
    ) -> list[Measurement]:
        calls.append(list(prompts))
        return [Measurement([[9 + len(calls)] * (i + 1)]) for i in range(len(prompts))]

    results = [ask("w1", "w2"), ask("w3"), ask("w4", "w5")]
    measure(tiny_backbone(), {"ar": numbered}, results, 3, 2)
    assert [len(result.answers["ar"].turns) for result in results] == [2, 1, 2]
    assert [len(prompts) for prompts in calls] == [1, 2, 2, 1, 1, 1]  # the first two warm up
    assert calls[3] == [results[0].prompts[1]]


def test_a_question_longer_than_the_context_is_refused_before_anything_is_measured() -> None:
    ran: list = []
    with pytest.raises(UserError, match="questions"):
        measure(
            tiny_backbone(positions=24),
            {"ar": method(lambda n: [9], ran)},
            [ask("w1"), ask("w1 " * 40)],
            3,
        )
    assert not ran


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_turn_that_answers_make_longer_than_the_context_is_left_out(
    caplog: pytest.LogCaptureFixture, batch_size: int
) -> None:
    backbone, results = tiny_backbone(positions=24), [ask("w1", "w2", "w3"), ask("w1")]
    for names in (("ar", "medusa"), ("hf",)):
        measure(
            backbone, {name: method(lambda n: [9] * n) for name in names}, results, 20, batch_size
        )
        assert all(len(result.answers[name].turns) == 1 for result in results for name in names)
    assert len(caplog.records) == 1


# The command


def test_benches_of_the_same_second_have_names_of_their_own(tmp_path: Path) -> None:
    paths = [save({"title": str(number)}, tmp_path) for number in range(5)]
    assert sorted(tmp_path.glob("*.json")) == paths  # the newest one last


@pytest.mark.slow
def test_sampling_reports_quality_and_no_identity(place: Path) -> None:
    document = bench_json(place, "--temperature", "0.8", "--limit", "1", "--methods", "ar,medusa")
    assert document["sampling"]["mode"] == "exact"
    assert document["methods"]["medusa"]["identical"] is None
    assert set(document["quality"]) == {"ar", "medusa"}


@pytest.mark.quick("demo")
@pytest.mark.parametrize("words", ["bench --questions q.jsonl --limit 1", "demo"])
def test_only_one_copy_of_the_weights_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    alive: list[int] = []
    networks: list[weakref.ref] = []

    def counted(*args, **rest):
        alive.append(sum(network() is not None for network in networks))
        network, tokenizer = load_network(*args, **rest)
        networks.append(weakref.ref(network))
        return network, tokenizer

    monkeypatch.chdir(place)
    for module in (running, engine_load):
        monkeypatch.setattr(module, "load_network", counted)
    medusa(*words.split(), "--run", place / "mine", "--dtype", "fp32", "--max-new-tokens", "2")
    # Our own engine reads the files; transformers' model is loaded for its methods alone.
    assert alive == [0]


@pytest.mark.slow
def test_all_methods_decode_by_the_models_own_config(place: Path, tmp_path: Path) -> None:
    model = shutil.copytree(place / "model", tmp_path / "model")
    rules = json.loads((model / "generation_config.json").read_text())
    rules |= {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "repetition_penalty": 1.4}
    (model / "generation_config.json").write_text(json.dumps(rules))
    words = ["--methods", "hf,hf-lookup,ar,medusa", "--limit", "2"]
    document = bench_json(place, "--model", str(model), *words)
    assert {figures["identical"] for figures in document["methods"].values()} == {2}
    bare = bench_json(place, "--methods", "ar", "--limit", "2")
    turns = [[row["turns"] for row in own["methods"]["ar"]["answers"]] for own in (document, bare)]
    assert turns[0] != turns[1]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "kept"), [(".", "x1"), ("../mine", "mine")])
def test_a_bench_without_a_run_lies_under_the_models_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, kept: str
) -> None:
    monkeypatch.chdir(shutil.copytree(place / "model", tmp_path / "x1"))
    (tmp_path / "mine").symlink_to(tmp_path / "x1")
    words = [
        "--questions",
        place / "q.jsonl",
        "--limit",
        1,
        "--max-new-tokens",
        2,
        "--methods",
        "ar,medusa",
    ]
    words += [
        "--drafter",
        place / "mine/drafter",
        "--tree",
        place / "mine/tree.json",
        "--dtype",
        "fp32",
    ]
    medusa("bench", "--model", named, *words)
    assert [path.name for path in Path("runs").iterdir()] == [kept]


@pytest.mark.slow
def test_results_are_printed_before_they_are_saved(place: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "mine", str(place / "model"))
    run.bench_dir.write_text("in the way")
    for more in ([], ["--json"]):
        done = bench(
            place, "--run", str(run.path), "--limit", "1", "--methods", "ar", *more, exit_code=1
        )
        assert "ar" in done.stdout
        assert str(run.bench_dir) in done.stderr


# Methods


@pytest.mark.slow
def test_every_method_answers_alike_alone_and_in_batches(place: Path) -> None:
    names, before = ["hf", "ar", "medusa"], set((place / "mine" / "bench").glob("*.json"))
    single = bench_json(place, "--tree", "static", "--methods", "hf-lookup," + ",".join(names))
    batched = bench_json(
        place, "--tree", "static", "--methods", ",".join(names), "--batch-size", "3"
    )
    assert len(set((place / "mine" / "bench").glob("*.json")) - before) == 2
    for document in (single, batched):
        methods = document["methods"]
        assert methods["hf"]["speedup"] == methods["ar"]["overhead"] == pytest.approx(1)
        for figures in methods.values():
            assert figures["identical"] == figures["questions"] == 4
            assert figures["differences"] == []
            assert figures["tokens"] == single["methods"]["hf"]["tokens"] > 0
            assert set(figures["per_category"]) == {"a", "b"}
            assert figures["tokens_per_s"] > 0
    for name in names:
        ours, other = single["methods"][name], batched["methods"][name]
        assert ours["acceptance_length"] == pytest.approx(other["acceptance_length"])
    drafted, used = single["methods"]["medusa"], single["drafting"]["medusa"]
    low, high = drafted["speedup_95"]
    assert drafted["acceptance_length"] >= 1
    assert low <= drafted["speedup"] <= high
    assert (used["kind"], used["nodes"], used["dynamic"], used["lookup"]) == (
        "medusa",
        6,
        False,
        False,
    )
    assert used["drafter"] == str(place / "mine" / "drafter")
    assert used["tree"] == str(place / "mine/tree.json")
    reached = [share["reached"] for share in drafted["by_position"]]
    assert len(reached) <= TREE.max_depth
    assert reached == sorted(reached, reverse=True)


@pytest.mark.slow
def test_servers_are_methods_and_their_drafts_are_compared_with_their_plain_output(
    place: Path,
) -> None:
    model, run = place / "model", place / "mine"
    with (
        Medusa.from_pretrained(model, drafter=None, dtype="fp32") as plain,
        Medusa.from_pretrained(model, run=f"{run}/", tree="static", dtype="fp32") as drafted,
        serving(plain) as one,
        serving(drafted) as two,
    ):
        peers = ("--peer", f"engine={one.url}", "--peer", f"engine-heads={two.url}/v1")
        words = ("--methods", "ar,medusa,hf,hf-lookup", "--limit", "2")
        methods = bench_json(place, *words, *peers)["methods"]
    own = {name: figures["own_plain"] for name, figures in methods.items()}
    assert own["engine-heads"] == {"method": "engine", "identical": 2, "drafted": None}
    assert own["hf-lookup"]["method"] == "hf"
    assert own["medusa"]["method"] == "ar"
    assert {name for name, entry in own.items() if entry is None} == {"ar", "hf", "engine"}
    assert {figures["identical"] for figures in methods.values()} == {2}


def test_answers_that_a_peers_drafts_change_are_counted(place: Path) -> None:
    def answers(last: int) -> Callable[[dict], dict]:
        """Returns a server's answers: those to the first question, after a warm-up, end in `last`."""
        return lambda number: {"token_ids": [5, 9, last if number in (1, 2) else 7], "text": ""}

    with TokenServer(answers(7)) as plain, TokenServer(answers(8)) as drafted:
        peers = ("--peer", f"theirs={plain.url}", "--peer", f"theirs-ngram={drafted.url}")
        document = bench_json(place, "--methods", "ar", *peers)
    own = document["methods"]["theirs-ngram"]["own_plain"]
    assert own["method"] == "theirs"
    assert own["identical"] == 3
    head, rows = gains_table(document)
    assert [row[-1] for row in rows] == ["-", "-", "3/4 of theirs"]
    assert len(head) == len(rows[0])


@pytest.mark.slow
def test_a_peer_is_asked_for_a_model_that_it_has_loaded(place: Path) -> None:
    def say(number: int) -> dict:
        return {"token_ids": [5, 9], "text": ""}

    with TokenServer(say, "unloaded/model", "loaded") as server:
        document = bench_json(place, "--methods", "ar", "--peer", f"engine={server.url}")
    engine = document["methods"]["engine"]
    assert engine["tokens"] == 2 * 2 * engine["questions"]  # two turns of two tokens


def test_peers_that_cannot_be_asked_are_named(place: Path) -> None:
    refused(place, 1, "--peer", "--methods", "ar", "--peer", "gone=http://127.0.0.1:9")
    for peer in ("gone", "ar=http://127.0.0.1:9", "gone=ftp://x"):
        refused(place, 2, "--peer", "--methods", "ar", "--peer", peer)
    at = ("--methods", "ar", "--peer", "gone=http://127.0.0.1:9")
    refused(place, 2, "--batch-size", *at, "--batch-size", "2")
    refused(place, 2, "--peer", *at, "--temperature", "1")


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """Yields the address of a server that answers every request by these bytes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                """Reads the request's headers."""
            self.wfile.write(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0\r\n\r\n", *(b"HTTP/1.0 200 OK\r\n\r\n" + body for body in (b"{}", b"[]"))]
)
def test_peers_of_another_protocol_are_named(place: Path, reply: bytes) -> None:
    with replying(reply) as url:
        refused(place, 1, "--peer odd", "--methods", "ar", "--peer", f"odd={url}")


def test_peers_at_no_address_are_named(place: Path) -> None:
    refused(place, 1, "--peer odd", "--methods", "ar", "--peer", "odd=http://localhost:80a0")


def test_a_peers_text_ends_with_the_tokenizers_end_token() -> None:
    backbone = tiny_backbone()
    usual = backbone.tokenizer.eos_token_id
    backbone.generation_config.eos_token_id = [usual - 1, usual]

    def say(number: int) -> dict:
        return {"text": "w1 w2", "finish_reason": "stop"}

    with TokenServer(say) as server:
        reported: list[int] = []
        [answer] = server_method("theirs", server.url, backbone)([[5]], 9, reported.extend)
    assert answer.turns == [[*backbone.tokenizer.encode("w1 w2"), usual]]
    assert reported == backbone.tokenizer.encode("w1 w2")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "2"])
def test_ngram_drafts_are_a_method_and_the_drafter_alone_is_another(place: Path, size: str) -> None:
    methods = "ar,lookup,medusa-alone,medusa"
    document = bench_json(
        place, "--methods", methods, "--tree", "static", "--lookup", "--batch-size", size
    )
    assert ",".join(document["methods"]) == methods
    assert all(figures["identical"] == 4 for figures in document["methods"].values())
    assert document["drafting"]["medusa"]["lookup"]
    assert not document["drafting"]["medusa-alone"]["lookup"]


def test_drafters_of_several_kinds_stand_side_by_side(place: Path, tmp_path: Path) -> None:
    model = str(place / "model")
    outer = save_run(tmp_path / "mine", model)
    save_run(tmp_path / "mine" / "hydra", model, kind=HydraHeads, calibrated=True)
    save_run(tmp_path / "mine" / "second", model, heads=2, tree=Tree.chain(2))
    words = ["--run", str(outer.path), "--limit", "2", "--methods"]
    document = bench_json(place, *words, "ar,medusa,hydra,second", "--tree", "static")
    assert all(figures["identical"] == 2 for figures in document["methods"].values())
    used = {
        name: (part["kind"], part["nodes"], part["dynamic"])
        for name, part in document["drafting"].items()
    }
    assert used == {
        "medusa": ("medusa", 6, False),
        "hydra": ("hydra", 6, False),
        "second": ("medusa", 3, False),
    }
    other = bench_json(place, *words, "hydra", "--tree", "static:5", "--lookup")["drafting"][
        "hydra"
    ]
    assert other["lookup"]
    assert other["nodes"] == 5
    refused(place, 1, "amphista", *words, "medusa,amphista")
    refused(place, 1, "calibrate", *words, "medusa,hydra", "--tree", "static:5")
    refused(place, 2, "--tree static:200", *words, "hydra", "--tree", "static:200")
    refused(place, 2, "--drafter", *words, "ar,medusa,hydra", "--drafter", str(outer.drafter_dir))
    # Without a drafter by its name, medusa is the run's own; dynamic trees are of any size.
    words[1] = str(outer.path / "hydra")
    own = bench_json(place, *words, "medusa", "--tree", "dynamic:9")["drafting"]["medusa"]
    assert (own["kind"], own["nodes"], own["dynamic"]) == ("hydra", 9, True)


def test_assisted_generation_needs_a_draft_model_of_the_same_vocabulary(
    place: Path, tmp_path: Path
) -> None:
    small, other = (
        save_model(tmp_path / "small", layers=1),
        save_model(tmp_path / "other", vocab=80),
    )
    words = ["--limit", "2", "--methods", "hf,hf-assisted,ar", "--draft-model"]
    assert bench_json(place, *words, small)["methods"]["hf-assisted"]["identical"] == 2
    refused(place, 1, "--draft-model", *words, other)


@pytest.mark.parametrize(
    ("installed", "model", "file", "sampling", "named"),
    [
        (True, "smollm2-135m", None, Sampling(), None),
        (True, "other", None, Sampling(), "gguf"),
        (True, "other", Path("some.gguf"), Sampling("exact", 0.7), "temperature"),
        (True, "other", Path(__file__), Sampling(), "not a GGUF file"),
        (False, "smollm2-135m", None, Sampling(), "xllamacpp"),
    ],
)
def test_llama_cpp_decodes_greedily_from_a_known_file(
    monkeypatch, installed, model, file, sampling, named
) -> None:
    monkeypatch.setattr("medusa_cli.bench.peers.has_package", lambda name: installed)
    with pytest.raises(UsageError, match=named) if named else nullcontext():
        check_reader("llama.cpp", model, file, sampling)


def test_an_agents_turns_are_timed_with_their_cached_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "mine", save_model(tmp_path / "model", positions=4096)).path
    monkeypatch.setattr(questions, "RESULT_CHARACTERS", 400)
    words = ["--run", f"{run}/", "--dtype", "fp32", "--max-new-tokens", "8", "--json"]
    result = medusa("bench", "--agent", "--limit", "2", *words)
    document = json.loads(result.stdout)
    assert list(document["methods"]) == ["ar", "medusa"]
    for figures in document["methods"].values():
        assert figures["identical"] == 2
        turns = figures["by_turn"]
        assert len(turns) == 6
        assert all(turn["first_token_s"] > 0 for turn in turns)
        # The second conversation begins with the first one's system prompt.
        assert turns[0]["cached"] < 0.6 < turns[-1]["cached"] < 1
        lengths = [turn["prompt_tokens"] for turn in turns]
        assert lengths == sorted(lengths)
    medusa("bench", "--agent", "--coding", exit_code=2)


@pytest.mark.slow
def test_quantized_weights_are_compared_with_the_plain_models_answers(place: Path) -> None:
    words = ["--dtype", "bf16", "--limit", "2", "--methods", "hf,ar"]
    document = bench_json(place, *words, "--quantize", "int8")
    assert document["engine"] == "native"
    assert "Q8_0" in document["kernel"]
    assert 0.5 < document["quality"]["hf"]["agreement"] <= 1
    assert bench_json(place, *words)["quality"] is None


# Refusals


def test_files_that_do_not_fit_are_refused(place: Path, tmp_path: Path) -> None:
    save_tree(tmp_path / "deep.json", Tree.chain(5), {})
    refused(place, 1, "deep.json", "--tree", str(tmp_path / "deep.json"))
    refused(place, 1, "mine", "--model", save_model(tmp_path / "other", seed=9))
    assert "medusa tune" in medusa("bench", "--model", place / "model", exit_code=1).stderr
    run = save_run(
        tmp_path / "mine", str(place / "model"), calibrated=True, heads=2, tree=Tree.chain(2)
    )
    words = ["--run", str(run.path), "--methods", "ar,medusa", "--limit", "1"]
    deep = json.loads(run.calibration_path.read_text())["accuracies"] * 2
    run.calibration_path.write_text(json.dumps({"accuracies": deep}))
    refused(place, 1, "static:40", *words, "--tree", "static:40")
    run.calibration_path.write_text(json.dumps({"accuracies": deep, "temperatures": ["warm"]}))
    refused(place, 1, "temperatures[0]", *words, "--tree", "dynamic")
    (run.drafter_dir / "config.json").write_text("[1]")
    for methods in ("ar,medusa", "ar,medusa,hydra"):
        refused(place, 1, "config.json", *words, "--methods", methods)


@pytest.mark.slow
def test_misfits_are_refused_before_transformers_answers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "transformers_method", lambda *_: pytest.fail("it was measured"))
    other = save_run(tmp_path / "other", save_model(tmp_path / "wide", vocab=80))
    words = ["--methods", "hf,medusa"]
    refused(place, 1, "the drafter in", *words, "--drafter", str(other.drafter_dir))
    refused(place, 1, "the run", *words, "--model", save_model(tmp_path / "model", seed=9))
    refused(place, 1, "--peer gone", *words, "--peer", "gone=http://127.0.0.1:9")


# The demo


WIDTHS = {"wide": 120, "narrow": 60}


def demo_words(place: Path) -> list[str]:
    return ["demo", "--run", str(place / "mine"), "--dtype", "fp32", "--max-new-tokens", "12"]


@pytest.mark.slow
def test_demo_compares_each_answer_and_adds_transformers(place: Path) -> None:
    document = json.loads(medusa(*demo_words(place), "--json").stdout)
    assert len(document["answers"]) == len(demo.QUESTIONS)
    assert all(answer["identical"] and answer["text"] for answer in document["answers"])
    rows = document["methods"]
    assert list(rows) == ["ar", "medusa", "hf"]  # a folder has no GGUF file for llama.cpp
    assert {row["identical"] for row in rows.values()} == {3}
    assert {row["questions"] for row in rows.values()} == {3}
    assert rows["ar"]["tokens"] == rows["medusa"]["tokens"] == rows["hf"]["tokens"]


def test_demo_without_a_drafter_looks_up(place: Path) -> None:
    words = [
        "demo",
        "--model",
        str(place / "model"),
        "--lookup",
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "4",
    ]
    assert list(json.loads(medusa(*words, "--json").stdout)["methods"]) == ["ar", "lookup", "hf"]


@pytest.mark.slow
def test_piped_demo_prints_each_answer_once_and_nothing_moves(place: Path) -> None:
    text = json.loads(medusa(*demo_words(place), "--json").stdout)["answers"][0]["text"]
    done = medusa(*demo_words(place))
    assert done.stdout.count(demo.QUESTIONS[0]) == 1
    assert done.stdout.count(text) == 1
    assert "\x1b" not in done.output


@pytest.mark.quick("narrow")
@pytest.mark.parametrize("width", WIDTHS)
def test_demo_colors_drafts_in_panes_that_fit(
    place: Path, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    screen = console.Screen(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        width=WIDTHS[width],
        height=30,
    )
    monkeypatch.setattr(console, "out", screen)
    medusa(*demo_words(place), "--quiet")
    shown = screen.file.getvalue()
    lines = [Text.from_ansi(line) for line in shown.splitlines()]
    assert max(line.cell_len for line in lines) <= WIDTHS[width]
    beside = [
        line
        for line in lines
        if demo.TITLES["ar"] in line.plain and demo.TITLES["medusa"] in line.plain
    ]
    assert len(beside) == (3 if width == "wide" else 0)


def side(*steps: list[int]) -> demo.Side:
    measured = Measurement([[]], seconds=1.0)
    made = demo.Side("side", measured)
    for step in steps:
        measured.turns[0] += step
        made.add([Piece(f"t{token} ", token is not step[-1]) for token in step])
    return made


def test_demo_marks_accepted_tokens_and_says_where_answers_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafted = side([5], [6, 7, 8])
    assert [drafted.text.plain[span.start : span.end] for span in drafted.text.spans] == [
        "t6 ",
        "t7 ",
    ]
    demo.show_answers(side([5], [6], [7], [8]), drafted)
    assert "t5 t6 t7 t8" in (same := capsys.readouterr().out)
    assert same.count("t5") == 1
    demo.show_answers(side([5], [6], [9]), drafted)
    assert (parted := capsys.readouterr().out).count("t5") == 2
    assert "token 2" in parted


def test_demo_explains_other_programs_only_where_they_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = Measurement([[1, 2], [3]], 1.0)
    measured = {"ar": plain, "hf": Measurement([[1, 9], [3]], 2.0)}
    rows = {name: demo.figures_of(name, measured) for name in measured}
    assert rows["hf"]["identical"] == 1
    assert rows["hf"]["speedup"] == 0.5
    captions = []
    for identical in (1, 2):
        rows["hf"]["identical"] = identical
        console.result(demo.closing_table(rows, "facts"))
        captions.append(capsys.readouterr().out.rpartition("facts.")[2].strip())
    assert captions[0]
    assert not captions[1]


def test_no_file_of_the_reproduction_is_taken_for_a_measurement(tmp_path: Path) -> None:
    measurements = [f"{name}.json" for name, _ in papers.benches(tmp_path, 1, 1)]
    written = {file.name for file in tmp_path.iterdir()}
    assert written
    assert written.isdisjoint(measurements)


def test_what_a_bench_cannot_compare_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    words = ["bench", "--mt-bench", "--limit", "1", "--model", model, "--lookup"]
    assert "--methods" in medusa(*words, exit_code=2).stderr  # there is no drafter


@pytest.mark.parametrize(("name", "length"), [("hf", 1.0), ("hf-lookup", None)])
def test_tokens_per_step_of_others_drafts_are_unknown(name: str, length: float | None) -> None:
    answers = {method: Measurement([[1, 2]], seconds=1.0) for method in (name, "ar")}
    result: Any = SimpleNamespace(answers=answers)
    assert _rates([result], name, "ar")["acceptance_length"] == length
