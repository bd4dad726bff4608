"""Real weights and questions: the included drafters, and the small model with one of each kind trained here."""

from pathlib import Path

import pytest
import torch

from medusa_cli.bench.digest import PUBLISHED
from medusa_cli.bench.questions import read_questions
from medusa_cli.device import has_bf16
from medusa_cli.engine import load_backbone
from medusa_cli.files import fetch
from medusa_cli.files.catalogue import DEFAULT_MODEL, SMALL_MODEL
from medusa_cli.files.io import read_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.tree import DynamicTree
from medusa_cli.tree.io import load_tree
from medusa_cli.tree.search import expected_length, search
from tests.helpers import generate, generate_batch, generate_plain, medusa_json, tokens_of
from tests.test_drafters import drafter_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports go where the test runs."""
    monkeypatch.chdir(tmp_path)


# A Hydra for the small model. It is not included, as the model is as fast with n-gram drafts alone.
SMALL_RUN = Run(Path(__file__).parent / "pretrained" / SMALL_MODEL)
DRAFTER = ("--drafter", str(SMALL_RUN.path))


@pytest.mark.parametrize(
    ("model", "most_bytes", "expected"),
    [
        (SMALL_MODEL, 16_000_000, 2.2),
        (DEFAULT_MODEL, 40_000_000, 1.8),
        ("qwen2.5-coder-1.5b", 54_000_000, 1.8),
    ],
)
def test_shipped_drafter_is_small_whole_and_has_provenance(
    model: str, most_bytes: int, expected: float
) -> None:
    run = Run.pretrained(model) or SMALL_RUN
    sizes = [path.stat().st_size for path in run.path.rglob("*") if path.is_file()]
    assert sum(sizes) <= most_bytes
    config = read_json(run.drafter_dir / "config.json")
    provenance = config["provenance"]
    assert provenance["backbone"]["id"] == model
    assert provenance["recipe"]["train"]["stage"] == 1
    calibration = read_json(run.calibration_path)
    tree = load_tree(run.tree_path)
    assert (
        tree.max_depth
        <= config["num_heads"]
        == calibration["heads"]
        == len(calibration["temperatures"])
    )
    assert expected_length(tree, calibration["accuracies"]) > expected


@pytest.mark.quick("smollm2-135m")
@pytest.mark.parametrize("model", PUBLISHED)
def test_logits_have_the_published_digest(model: str) -> None:
    if model != SMALL_MODEL and ModelSource.of(model).must_be_fetched:
        pytest.skip(f"{model} is not in the cache")
    page = Path(__file__).parent.parent / "docs/engines.md"
    assert f"`{PUBLISHED[model]}`" in page.read_text(encoding="utf-8")
    assert medusa_json("machine", "--digest", "--model", model)["published"] == PUBLISHED[model]


def test_drafted_answers_equal_plain_ones_in_fp32_and_take_fewer_steps() -> None:
    words = [
        "chat",
        "--model",
        SMALL_MODEL,
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "48",
        "--prompt",
        "Name three primary colors and why.",
    ]
    drafted = medusa_json(*words, *DRAFTER, "--tree", "static")
    plain = medusa_json(*words, "--baseline")
    assert drafted["answer"] == plain["answer"]
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["acceptance_length"] > 1.3
    assert plain["acceptance_length"] == 1


@pytest.mark.slow
def test_bf16_runs_on_real_questions() -> None:
    words = ["--limit", "2", "--max-new-tokens", "20", "--methods", "ar,medusa", "--tree", "static"]
    document = medusa_json("bench", "--model", SMALL_MODEL, *DRAFTER, "--mt-bench", *words)
    methods = document["methods"]
    assert methods["medusa"]["acceptance_length"] > 1.3
    assert methods["medusa"]["overhead"] > 0
    assert {len(method["per_category"]) for method in methods.values()} == {2}


@pytest.mark.slow
def test_twenty_questions_are_token_identical_in_fp32() -> None:
    words = [
        "--limit",
        "20",
        "--max-new-tokens",
        "256",
        "--methods",
        "ar,medusa",
        "--dtype",
        "fp32",
    ]
    document = medusa_json("bench", "--model", SMALL_MODEL, *DRAFTER, "--mt-bench", *words)
    assert document["methods"]["medusa"]["identical"] == 20


KINDS = {
    "medusa": [],
    "hydra": ["drafter=hydra", "drafter.matrices=one"],
    "hydra++": ["drafter=hydra", "drafter.matrices=one", "drafter.prefix_layers=1"],
    "amphista": ["drafter=amphista", "drafter.matrices=one"],
    "firp": ["drafter=firp", "train.lr=1e-2"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with some of the model's own answers, which every drafter learns from a little."""
    run = tmp_path_factory.mktemp("answers")
    medusa_json(
        "distill",
        "--model",
        SMALL_MODEL,
        "--run",
        f"{run}/",
        "--max-samples",
        "192",
        "--max-new-tokens",
        "96",
        "distill.max_turns=1",
    )
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_is_token_identical_in_fp32_and_takes_fewer_steps(
    kind: str, answers: Path
) -> None:
    run = f"{answers}/{kind}"
    medusa_json(
        "train", *KINDS[kind], "train.max_tokens=15000", "train.warmup_steps=2", "--run", run
    )
    medusa_json("calibrate", "--run", run)
    words = [
        "--limit",
        "4",
        "--max-new-tokens",
        "64",
        "--methods",
        "ar,medusa",
        "--tree",
        "static:16",
    ]
    document = medusa_json("bench", "--mt-bench", "--run", run, "--dtype", "fp32", *words)
    measured = document["methods"]["medusa"]
    assert measured["identical"] == measured["questions"] == 4
    assert measured["acceptance_length"] > 1.05


LENGTHS = (1500, 40)  # of prompts, in tokens
TREES = (search([[0.3 / (rank + 1) for rank in range(8)]] * 3, 64), DynamicTree(24, 3))
ANSWER = {"max_new_tokens": 24, "stop_ids": ()}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def decoded(request: pytest.FixtureRequest) -> tuple[Backbone, list[list[int]], list[list[int]]]:
    """Returns the model in a number type, prompts of questions, and its plain answers."""
    if request.param == "bf16" and not has_bf16():
        pytest.skip("no bf16 kernels")
    backbone = load_backbone(SMALL_MODEL, LoadOptions(dtype=request.param, engine="native"))
    texts = " ".join(question.turns[0] for question in read_questions(fetch.mt_bench_path())[0])
    tokens = backbone.tokenizer(texts)["input_ids"]
    prompts = [tokens[:length] for length in LENGTHS]
    return (
        backbone,
        prompts,
        [tokens_of(generate_plain(backbone, prompt, **ANSWER)) for prompt in prompts],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa-draft", "hydra-draft", "hydra++-prompt", "amphista-prompt", "eagle-draft",
                                  "firp-draft"])  # fmt: skip
def test_random_heads_of_every_kind_give_the_plain_answer_in_every_number_type(
    kind: str, decoded: tuple[Backbone, list[list[int]], list[list[int]]]
) -> None:
    backbone, prompts, answers = decoded
    assert backbone.engine.row_invariant
    drafter = drafter_of(backbone, kind)
    # The commonest tokens, so that some guesses are right.
    if few := drafter.config.draft_vocab_size:
        drafter.draft_ids.copy_(torch.tensor(sum(answers, [])).bincount().topk(few).indices)
    steps = [list(generate(backbone, drafter, TREES[0], prompt, **ANSWER)) for prompt in prompts]
    assert [tokens_of(own) for own in steps] == answers
    # Some draft tokens were accepted.
    assert not few or sum(map(len, steps)) < sum(map(len, answers))
    for tree in TREES:
        together = generate_batch(backbone, drafter, tree, prompts, batch_size=2, **ANSWER)
        assert [tokens_of(own) for own in together] == answers
