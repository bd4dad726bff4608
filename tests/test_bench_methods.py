"""`medusa bench` and `medusa demo`, method by method: lookups, several drafters, dynamic trees, llama.cpp, rounding."""

import json
from pathlib import Path

import pytest

from medusa_cli.backbone.cpu import has_bf16
from medusa_cli.benchmarks.methods import check_batch, check_llama
from medusa_cli.decoding import Sampling
from medusa_cli.drafters import HydraHeads
from medusa_cli.errors import UsageError
from medusa_cli.tree import Tree
from tests.benches import bench, medusa, save_bench
from tests.runs import save_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("size", ["1", "2"])
def test_lookups_are_a_method_and_the_drafter_alone_is_another(place: Path, size: str) -> None:
    methods = "ar,lookup,medusa-alone,medusa"
    shown = bench(place, "--json", "--methods", methods, "--tree", "static", "--lookup", "--batch-size", size)
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert set(document["methods"]) == set(methods.split(","))
    assert all(one["identical"] == 4 for one in document["methods"].values())
    assert document["drafting"]["medusa"]["lookup"] and not document["drafting"]["medusa-alone"]["lookup"]
    assert set(document["drafting"]) == {"medusa", "medusa-alone"}
    assert "what the text repeats" in " ".join(document["facts"])


def test_a_model_without_a_shipped_drafter_says_what_to_do(place: Path) -> None:
    shown = medusa("bench", "--model", str(place / "model"))
    assert shown.exit_code == 1 and "no drafter ships" in shown.stderr and "medusa train" in shown.stderr


def test_the_demo_shows_both_answers_and_the_table(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.assets.mt_bench_path", lambda: place / "q.jsonl")
    shown = medusa("demo", "--run", str(place / "mine"), "--dtype", "fp32", "--limit", "2", "--max-new-tokens", "12")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count("--- plain decoding") == shown.stdout.count("--- with drafts") == 2
    assert "output identical to plain decoding: yes" in shown.stdout, shown.stdout[-2000:]
    plain = shown.stdout.split("--- plain decoding")[1].split("--- with drafts")[0]
    assert "\n\n" in plain.partition("\n")[2].strip()  # the two turns' answers stand apart
    for heading in ("tokens/s", "speedup", "acceptance", "overhead"):
        assert heading in shown.stdout, shown.stdout[-2000:]


def test_the_demo_says_how_often_and_by_how_little_near_ties_flipped() -> None:
    from medusa_cli.commands.demo import _verdict

    parted = {"questions": 3, "identical": 1, "tokens": 1200, "divergences": [{"margin": 0.0}, {"margin": 0.125}]}
    said = _verdict(parted, "bfloat16")
    for words in ("in 1 of 3 answers", "2 times in 1,200 tokens", "at most 0.12 apart", "bfloat16", "--dtype fp32"):
        assert words in said
    assert _verdict(parted, "float32") == "output identical to plain decoding: in 1 of 3 answers"
    whole = {"questions": 3, "identical": 3, "tokens": 1200, "divergences": []}
    assert _verdict(whole, "bfloat16").endswith(": yes")


def test_lookup_and_dynamic_trees_are_methods_too_and_llama_cpp_needs_its_package(place: Path) -> None:
    shown = bench(place, "--json", "--methods", "hf,hf-lookup,ar,medusa,medusa-dynamic")
    assert shown.exit_code == 0, shown.stderr
    methods = json.loads(shown.stdout)["methods"]
    assert list(methods) == ["hf", "hf-lookup", "ar", "medusa", "medusa-dynamic"]
    assert all(one["identical"] == one["questions"] for one in methods.values())
    dynamic = bench(place, "--tree", "dynamic:4", "--methods", "ar,medusa")
    assert dynamic.exit_code == 0 and "dynamic trees of at most 4 nodes" in dynamic.stderr
    refused = bench(place, "--tree", "dynamic:none")
    assert refused.exit_code == 2 and "'none' is no number of nodes" in refused.stderr
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        refused = bench(place, "--methods", "llama.cpp")
        assert refused.exit_code == 2 and "llama-cpp-python is not installed" in refused.stderr


def test_drafters_of_several_kinds_stand_side_by_side(place: Path, tmp_path: Path) -> None:
    model = str(place / "model")
    outer = save_run(tmp_path / "mine", model)
    save_run(tmp_path / "mine" / "hydra", model, kind=HydraHeads, calibrated=True)
    save_run(tmp_path / "mine" / "second", model, heads=2, tree=Tree.chain(2))
    words = ["bench", "--questions", str(place / "q.jsonl"), "--limit", "2", "--dtype", "fp32", "--json"]
    words += ["--run", str(outer.path), "--max-new-tokens", "12", "--methods"]
    shown = medusa(*words, "ar,medusa,hydra,second", "--tree", "static")
    assert shown.exit_code == 0, shown.stderr
    methods = json.loads(shown.stdout)["methods"]
    assert list(methods) == ["ar", "medusa", "hydra", "second"]
    assert all(one["identical"] == 2 for one in methods.values())
    assert "mine/drafter" in shown.stderr and "mine/hydra/drafter" in shown.stderr
    document = json.loads(shown.stdout)
    assert {name: (one["kind"], one["nodes"]) for name, one in document["drafting"].items()} == {
        "medusa": ("medusa", 6),
        "hydra": ("hydra", 6),
        "second": ("medusa", 3),
    }
    facts = " ".join(document["facts"])
    for name, one in document["drafting"].items():
        assert f"{name}: {one['kind']} drafter {one['drafter']} of {one['created'][:10]}, tree of" in facts
    refused = medusa(*words, "medusa,amphista")
    assert refused.exit_code == 1 and "there is no amphista drafter in" in refused.stderr
    refused = medusa(*words, "medusa,hydra", "--tree", "static:5")
    assert refused.exit_code == 1 and "is not calibrated" in refused.stderr
    refused = medusa(*words, "hydra", "--tree", "static:200")
    assert refused.exit_code == 2 and "--tree static:200 cannot be; these heads allow 1 to 40" in refused.stderr
    searched = medusa(*words, "hydra", "--tree", "static:5")
    assert searched.exit_code == 0 and "tree of 5 nodes" in searched.stderr
    assert json.loads(searched.stdout)["drafting"]["hydra"]["tree"] is None
    refused = medusa(*words, "ar,medusa,hydra", "--drafter", str(outer.drafter_dir))
    assert refused.exit_code == 2 and "none of --methods ar,medusa,hydra takes it" in refused.stderr


def test_beside_named_drafters_lookups_are_theirs_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.assembly.looked_up", lambda *args: pytest.fail("lookups alone were prepared"))
    outer = save_run(tmp_path / "mine", str(place / "model"))
    save_run(tmp_path / "mine" / "second", str(place / "model"))
    words = ["--run", str(outer.path), "--methods", "second", "--tree", "static", "--lookup", "--limit", "1", "--json"]
    shown = bench(place, *words)
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["drafting"]["second"]["lookup"]


def test_where_nothing_can_be_looked_up_that_is_said_before_the_baseline(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args, **rest):
        raise UsageError("nothing is looked up here", "leave it out")

    monkeypatch.setattr("medusa_cli.benchmarks.bench.looked_up", refused)
    monkeypatch.setattr("medusa_cli.benchmarks.bench.resolve_device", lambda device: "cuda:0")
    monkeypatch.setattr("medusa_cli.benchmarks.bench.measure_baseline", lambda *args: pytest.fail("it was measured"))
    shown = bench(place, "--methods", "hf,lookup")
    assert shown.exit_code == 2 and "nothing is looked up here" in shown.stderr


def test_dynamic_trees_are_over_the_drafter_that_medusa_stands_for(place: Path, tmp_path: Path) -> None:
    model = str(place / "model")
    outer = save_run(tmp_path / "mine", model, kind=HydraHeads)
    save_run(tmp_path / "mine" / "medusa", model, heads=2, tree=Tree.chain(2))
    words = ["bench", "--questions", str(place / "q.jsonl"), "--limit", "1", "--dtype", "fp32", "--json"]
    words += ["--run", str(outer.path), "--max-new-tokens", "5", "--tree", "static", "--methods"]
    shown = medusa(*words, "hydra,medusa,medusa-dynamic")
    assert shown.exit_code == 0, shown.stderr
    drafting = json.loads(shown.stdout)["drafting"]
    assert drafting["medusa"]["drafter"] == drafting["medusa-dynamic"]["drafter"] != drafting["hydra"]["drafter"]
    assert drafting["medusa-dynamic"]["dynamic"] and drafting["medusa-dynamic"]["nodes"] == 3
    alone = medusa(*words, "medusa-dynamic")
    assert json.loads(alone.stdout)["drafting"]["medusa-dynamic"]["kind"] == "hydra"


def test_what_was_measured_is_shown_before_it_is_saved(place: Path, tmp_path: Path) -> None:
    run = save_run(tmp_path / "mine", str(place / "model"))
    run.bench_dir.write_text("in the way")
    for more in ([], ["--json"]):
        shown = bench(place, "--run", str(run.path), "--limit", "1", "--methods", "ar", *more)
        assert shown.exit_code == 1 and "ar" in shown.stdout and str(run.bench_dir) in shown.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "ar", "--gguf", "{here}/q.jsonl"], "says nothing to --methods ar"),
        (["--methods", "llama.cpp", "--gguf", "{here}/nowhere.gguf"], "'--gguf'"),
        (["--methods", "llama.cpp"], "--methods llama.cpp"),
        (["--methods", "ar,hf", "--drafter", "{here}/mine/drafter"], "none of --methods ar,hf takes it"),
        (["--context", "20"], "--context 20 says nothing without --steps"),
        (["--batch-size", "2", "--methods", "hf-lookup"], "one sequence at a time"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr("medusa_cli.commands.bench.load", lambda *args, **rest: pytest.fail("it was loaded"))
    shown = bench(place, *(word.format(here=place) for word in words))
    assert shown.exit_code == 2 and said in shown.stderr


def test_llama_cpp_is_asked_for_greedy_decoding_of_a_known_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_llama("smollm2-135m", None, Sampling())
    with pytest.raises(UsageError, match="no GGUF file of 'other' is known; give gguf FILE"):
        check_llama("other", None, Sampling())
    with pytest.raises(UsageError, match="greedy decoding alone"):
        check_llama("other", Path("some.gguf"), Sampling("exact", 0.7))


def test_what_runs_one_sequence_at_a_time_is_no_batch_method() -> None:
    check_batch(["hf", "ar", "medusa", "firp", "medusa-dynamic"])
    for name in ("hf-lookup", "llama.cpp"):
        with pytest.raises(UsageError, match=f"methods {name} decodes one sequence at a time"):
            check_batch(["ar", name])


@pytest.mark.skipif(not has_bf16(), reason="no bf16 kernels here")
def test_rounded_weights_say_how_far_they_move_the_model(place: Path) -> None:
    words = ["--json", "--dtype", "bf16", "--limit", "2", "--methods"]
    found = json.loads(bench(place, *words, "hf,ar", "--engine", "int8").stdout)
    assert (found["engine"], found["kernel"]) == ("fast", "int8") and found["rounding"]["tokens"] > 0
    assert 0 < found["rounding"]["kl"] < 0.1 and 0.5 < found["rounding"]["agreement"] <= 1
    assert "Rounded to 8 bits" in " ".join(found["facts"])
    assert json.loads(bench(place, *words, "hf,ar").stdout)["rounding"] is None
    refused = bench(place, "--engine", "int8", "--methods", "ar")
    assert refused.exit_code == 2 and "--engine int8 rounds bf16 weights on a CPU, not float32" in refused.stderr
