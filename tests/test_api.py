"""The Python API gives what decoding gives, refuses wrong values at the call, and its page runs as written."""

import asyncio
import gc
import json
import pickle
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from medusa_cli import Medusa
from medusa_cli.api import GenerationOptions, OptionFields
from medusa_cli.decode import AdaptivePolicy
from medusa_cli.decode.sequence import DraftState
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.resolve import _model_of
from medusa_cli.tree import DynamicTree
from tests.helpers import generate_plain, python, save_model, save_run, tokens_of

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
IDS = [5, 9, 20, 11, 7]
# Values of arguments that are refused by the argument's name.
REFUSED: dict[str, list[Any]] = {
    "max_new_tokens": [0, 2.5], "top_k": [2.5, 5], "seed": ["1"], "logprobs": [True, -1], "temperature": [-1.0],
    "top_p": [0.0, 0.9], "sampling": ["lucky"], "min_p": [0.1], "logit_bias": [{64: 1.0}], "suppress_tokens": [[99]],
    "min_new_tokens": [600],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a run of it, runs/mine."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "runs").mkdir()
    model = save_model(folder / "model")
    save_run(folder / "runs" / "mine", model, calibrated=True)
    return folder


@pytest.fixture(scope="module")
def medusa(place: Path) -> Medusa:
    return Medusa.from_pretrained(drafter=place / "runs" / "mine", tree="static", dtype="fp32")


def alone(medusa: Medusa, prompt: list[int], count: int = 24, **rules) -> list[int]:
    steps = generate_plain(medusa.backbone, prompt, max_new_tokens=count, **rules)
    return tokens_of(steps)


@pytest.mark.slow
def test_stream_is_plain_decoding(medusa: Medusa) -> None:
    stream = medusa.stream(IDS, max_new_tokens=24, stop_ids=())
    text = "".join(stream)
    assert stream.answer.tokens == alone(medusa, IDS, stop_ids=())
    assert text == stream.answer.text == medusa.backbone.decode(stream.answer.tokens)
    assert stream.answer.finish_reason == "length"
    assert stream.answer.stats.tokens == 24
    assert stream.answer.prompt_tokens == len(IDS)


@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [[], [0.9, 1.0, 1.1]], ids=["static", "growing"])
def test_trees_grow_if_the_confidences_are_calibrated(
    place: Path, tmp_path: Path, temperatures: list[float]
) -> None:
    run = save_run(tmp_path / "run", str(place / "model"), calibrated=True)
    known = json.loads(run.calibration_path.read_text())
    run.calibration_path.write_text(json.dumps({**known, "temperatures": temperatures}))
    medusa = Medusa.from_pretrained(drafter=run.path, tree="auto", dtype="fp32", lookup=False)
    policy = medusa.loaded.policy
    assert isinstance(policy, AdaptivePolicy)
    policy._current = 1  # draft, whatever the times on this machine are
    sequence = SimpleNamespace(draft=DraftState(), tokens=IDS)
    proposal, _ = policy.propose([sequence], [[]])[0]
    assert isinstance(proposal, DynamicTree) == bool(temperatures)
    stream = medusa.stream(IDS, max_new_tokens=24, stop_ids=())
    assert "".join(stream)
    assert stream.answer.tokens == alone(medusa, IDS, stop_ids=())


def test_streams_may_be_read_in_turn(medusa: Medusa) -> None:
    prompts = [IDS, [8, 30], [6, 6, 50]]
    streams = [medusa.stream(prompt, max_new_tokens=16, stop_ids=()) for prompt in prompts]
    going = list(streams)
    while going:
        going = [stream for stream in going if stream.step() is not None]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.answer.tokens == alone(medusa, prompt, 16, stop_ids=())


def test_few_decoders_outlive_many_streams_at_once(place: Path) -> None:
    medusa = Medusa.from_pretrained(place / "model", drafter=None, dtype="fp32")
    streams = [medusa.stream([*IDS, number], max_new_tokens=8, stop_ids=()) for number in range(5)]
    decoders = [weakref.ref(stream._decoder) for stream in streams]
    for stream in streams:
        stream.close()
    del streams, stream
    gc.collect()
    assert sum(decoder() is not None for decoder in decoders) == len(medusa.idle) <= 2
    with medusa.stream(
        [*IDS, 4, 9], max_new_tokens=8, stop_ids=()
    ) as stream:  # the last one's prefix is there
        assert stream.reused == len(IDS) + 1


def test_batch_gives_each_prompt_what_it_gets_alone(medusa: Medusa) -> None:
    prompts = [IDS, [8], [30, 31, 32], [6, 6, 50], [12, 50]]
    answers = medusa.batch(prompts, batch_size=2, max_new_tokens=16)
    assert [answer.tokens for answer in answers] == [
        alone(medusa, prompt, 16) for prompt in prompts
    ]
    assert medusa.batch([]) == []


@pytest.mark.slow
def test_answers_depend_on_the_seed(medusa: Medusa) -> None:
    rules = {"max_new_tokens": 24, "temperature": 1.5, "stop_ids": ()}
    first, again, other, *unseeded = (
        medusa.generate(IDS, seed=seed, **rules).tokens for seed in (1, 1, 2, None, None)
    )
    assert first == again != other
    assert unseeded[0] != unseeded[1]


def test_a_stream_may_be_closed_while_another_thread_waits_for_it(medusa: Medusa) -> None:
    stream = medusa.stream(IDS, max_new_tokens=64, stop_ids=())
    assert next(stream)
    waiting: list[Any] = []
    with medusa.lock:
        reader = threading.Thread(target=lambda: waiting.append(list(stream)))
        reader.start()
        time.sleep(0.05)
        stream.close()
    reader.join(20)
    assert waiting == [[]]


@pytest.mark.parametrize("ids", [[-1], [10**6]])
def test_end_tokens_beyond_the_vocabulary_are_refused(medusa: Medusa, ids: list[int]) -> None:
    with pytest.raises(UsageError, match="stop_ids"):
        medusa.generate(IDS, stop_ids=ids)


def test_a_tree_without_a_drafter_is_refused(place: Path) -> None:
    for words in ({"drafter": None}, {"lookup": True}):
        with pytest.raises(UsageError, match="tree"):
            Medusa.from_pretrained(place / "model", tree="static", **words)


def test_a_drafter_of_another_tool_names_its_model(tmp_path: Path) -> None:
    for config in (
        {"medusa_num_heads": 2, "base_model_name_or_path": "org/model"},
        {"speculators_config": {"verifier": {"name_or_path": "org/model"}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert _model_of(tmp_path) == "org/model"


def test_numbers_of_numpy_are_numbers(medusa: Medusa) -> None:
    rules = {"max_new_tokens": 8, "temperature": 1.5, "stop_ids": ()}
    given = medusa.generate(IDS, seed=np.int64(7), top_k=np.int64(5), **rules).tokens
    assert given == medusa.generate(IDS, seed=7, top_k=5, **rules).tokens


def test_text_is_a_users_message_unless_raw(medusa: Medusa) -> None:
    asked = medusa.encode("w1 w2")
    assert asked == medusa.encode([{"role": "user", "content": "w1 w2"}])
    assert medusa.encode("w1 w2", raw=True) == asked[2:4]


@pytest.mark.parametrize("leave", ["close", "forget"])
def test_stream_that_is_left_frees_its_slot(medusa: Medusa, leave: str) -> None:
    stream = medusa.stream(IDS, max_new_tokens=400, stop_ids=())
    decoder = stream._decoder
    assert decoder is not None
    assert next(stream)
    assert not decoder.free_slots
    if leave == "close":
        stream.close()
        assert stream.answer.finish_reason == "cancelled"
        assert list(stream) == []
    del stream
    gc.collect()
    assert decoder.free_slots


def test_interrupted_stream_ends(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = medusa.stream(IDS, max_new_tokens=40, stop_ids=())
    texts = [next(stream), next(stream)]
    decoder = stream._decoder
    assert decoder is not None

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream._sequence, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert list(stream) == []
    assert stream.answer.finish_reason == "cancelled"
    assert decoder.free_slots
    assert medusa.generate(IDS, max_new_tokens=40, stop_ids=()).tokens == alone(
        medusa, IDS, 40, stop_ids=()
    )
    assert stream.answer.text == "".join(texts)


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_are_prompts(medusa: Medusa, array: Callable[[list], Any]) -> None:
    tokens = medusa.generate(IDS, max_new_tokens=8).tokens
    for prompt in (
        array(IDS),
        array([IDS]),
        list(array(IDS).tolist()),
        [np.int64(token) for token in IDS],
    ):
        assert medusa.generate(prompt, max_new_tokens=8).tokens == tokens
    answers = medusa.batch(array([IDS, IDS[::-1]]), max_new_tokens=8)
    assert answers[0].tokens == tokens != answers[1].tokens


@pytest.mark.parametrize("method", ["stream", "astream", "generate", "batch"])
def test_an_unknown_keyword_names_the_method(medusa: Medusa, method: str) -> None:
    call: Any = getattr(medusa, method)
    with pytest.raises(TypeError, match=rf"Medusa\.{method}\(\).*'max_tokens'"):
        answer = call([{"role": "user", "content": "w1"}], max_tokens=3)
        asyncio.run(anext(answer))  # an async generator begins when it is asked


def test_options_are_taken_whole_or_as_keywords(medusa: Medusa) -> None:
    options = GenerationOptions(max_new_tokens=9, temperature=0.8, seed=3)
    expected = medusa.generate(IDS, max_new_tokens=9, temperature=0.8, seed=3).tokens
    assert (
        medusa.generate(IDS, options).tokens == medusa.batch([IDS], options)[0].tokens == expected
    )
    assert medusa.generate(IDS, options, max_new_tokens=4).tokens == expected[:4]


def test_a_request_takes_no_options_beside_its_own(medusa: Medusa) -> None:
    request = medusa.request(IDS, max_new_tokens=3, stop_ids=())
    assert len(medusa.generate(request).tokens) == 3
    for ask in (medusa.stream, medusa.generate):
        for options in ((), (GenerationOptions(),)):
            with pytest.raises(UsageError, match="Request"):
                ask(request, *options, **({} if options else {"max_new_tokens": 5}))
    with pytest.raises(UsageError, match="Request"):
        asyncio.run(anext(medusa.astream(request, max_new_tokens=5)))


def test_async_streams_take_turns(medusa: Medusa) -> None:
    order: list[int] = []

    async def read(number: int) -> str:
        text = ""
        async for piece in medusa.astream(IDS[number:], max_new_tokens=12, stop_ids=()):
            order.append(number)
            text += piece
        return text

    async def both() -> list[str]:
        return list(await asyncio.gather(read(0), read(1)))

    assert asyncio.run(both()) == [
        medusa.generate(IDS[n:], max_new_tokens=12, stop_ids=()).text for n in (0, 1)
    ]
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


def test_closing_frees_the_model(place: Path) -> None:
    with Medusa.from_pretrained(place / "model", drafter=None, dtype="fp32") as medusa:
        assert medusa.generate(IDS, max_new_tokens=2).tokens
        network = weakref.ref(medusa.backbone.model)
    assert network() is None
    with pytest.raises(UserError, match="closed"):
        medusa.generate(IDS)
    with pytest.raises(UserError, match="closed"):
        asyncio.run(anext(medusa.astream(IDS)))
    medusa.close()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]]
)
def test_refusals_name_the_argument(medusa: Medusa, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}"):
        medusa.stream(IDS, **{name: value})


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [5, -1], [5, 64], [{"role": "user"}], ["w1"], [True], [5.0], None, 5),
        *(
            [{"role": "x", "content": "w1"}],
            np.array([[5, 9], [5, 9]]),
            torch.tensor(5),
            torch.tensor([5.0]),
        ),
    ],
    ids=repr,
)
def test_invalid_prompt_is_refused(medusa: Medusa, prompt: Any) -> None:
    with pytest.raises(UserError):
        medusa.stream(prompt)
    assert medusa.generate(IDS, max_new_tokens=2).tokens  # the slot is free


def test_invalid_arguments_are_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        Medusa.from_pretrained(place / "model", drafter=tmp_path)
    with pytest.raises(UserError, match="^drafter '/nowhere/at/all'"):
        Medusa.from_pretrained(place / "model", drafter="/nowhere/at/all")
    with pytest.raises(UsageError, match="^dtype 'fp33' is unknown"):
        Medusa.from_pretrained(place / "model", drafter=None, dtype="fp33")
    for words in ({"lookup": False}, {"tree": "static"}):
        with pytest.raises(UserError, match="the model"):
            Medusa.from_pretrained(place / "model", **words)
    with pytest.raises(UsageError, match="run"):
        Medusa.from_pretrained(drafter=place / "runs" / "mine", run=place / "runs" / "mine")


@pytest.mark.quick("words0")
@pytest.mark.parametrize("words", [{}, {"lookup": True}])
def test_a_model_without_a_drafter_drafts_ngrams(
    place: Path, medusa: Medusa, words: dict[str, bool]
) -> None:
    loaded = Medusa.from_pretrained(place / "model", dtype="fp32", **words)
    assert loaded.loaded.drafter is None
    assert "n-grams" in loaded.loaded.description
    prompt = IDS * 6
    stream = loaded.stream(prompt, max_new_tokens=24, stop_ids=())
    assert "".join(stream)
    assert stream.answer.tokens == alone(medusa, prompt, stop_ids=())
    assert stream.answer.stats.drafted > 0


@pytest.mark.slow
def test_lookup_goes_with_the_auto_tree_by_default(place: Path) -> None:
    run = place / "runs" / "mine"
    for words, ngrams in (
        ({}, True),
        ({"lookup": False}, False),
        ({"tree": "static"}, False),
        ({"tree": "static", "lookup": True}, True),
        ({"tree": "dynamic", "lookup": True}, True),
    ):
        loaded = Medusa.from_pretrained(drafter=run, dtype="fp32", **words)
        assert ("n-grams" in loaded.loaded.description) is ngrams, words


def test_a_drafters_folder_without_a_tree_drafts_chains(place: Path) -> None:
    run = place / "runs" / "mine"
    with pytest.raises(UserError, match="tree"):
        Medusa.from_pretrained(place / "model", drafter=run / "drafter", tree="static")
    chains = Medusa.from_pretrained(place / "model", drafter=run / "drafter", dtype="fp32")
    assert chains.loaded.policy is not None
    assert chains.loaded.policy.max_depth > 0
    loaded = Medusa.from_pretrained(
        place / "model", drafter=run / "drafter", tree=run / "tree.json", dtype="fp32"
    )
    assert "tree of 6 nodes" in loaded.loaded.description


FORKED = """
import os, sys, torch
from medusa_cli import Medusa
from medusa_cli.errors import UserError

torch.set_num_threads(2)
medusa = Medusa.from_pretrained(sys.argv[1], drafter=None, dtype="fp32", engine=sys.argv[2])
stream = medusa.stream([5, 9], max_new_tokens=8)
next(stream)
medusa.lock.acquire()  # as another thread may hold it
use = {
    "generate": lambda: medusa.generate([5, 9]),
    "stream": lambda: medusa.stream("w1"),
    "step": lambda: list(stream),
    "batch": lambda: medusa.batch([[5, 9]]),
    "astream": lambda: __import__("asyncio").run(anext(medusa.astream([5, 9]))),
    "encode": lambda: medusa.encode("w1"),
    "decoder": lambda: medusa.decoder(),
    "states": lambda: medusa._loaded.backbone.states(torch.tensor([[5, 9]])),
    "load": lambda: Medusa.from_pretrained(sys.argv[1], drafter=None, dtype="fp32"),
}
for name, call in use.items():
    if os.fork() == 0:
        try:
            call()
        except UserError as reason:
            print(name, "spawn" in str(reason), flush=True)
        stream.close()
        medusa.close()
        os._exit(0)
    os.wait()
medusa.lock.release()
print("parent", len("".join(stream)) > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "eager"])
def test_a_forked_process_is_told_to_load_its_own_model(place: Path, engine: str) -> None:
    code = FORKED.replace("sys.argv[1]", repr(str(place / "model")))
    done = python(code.replace("sys.argv[2]", repr(engine)), timeout=120)
    assert done.returncode == 0, done.stderr
    names = (
        "generate",
        "stream",
        "step",
        "batch",
        "astream",
        "encode",
        "decoder",
        "states",
        "load",
    )
    assert done.stdout.splitlines() == [*(f"{name} True" for name in names), "parent True"]


def test_an_answer_prints_and_is_pickled(medusa: Medusa) -> None:
    answer = medusa.generate(IDS, max_new_tokens=6, logprobs=2)
    assert str(answer) == answer.text
    assert repr(answer.text) in repr(answer)
    other = pickle.loads(pickle.dumps(answer))
    assert vars(other) == {
        name: value for name, value in vars(answer).items() if not name.startswith("_")
    }
    assert other.likelihoods
    assert other.stats.tokens == 6
    assert repr(other) == repr(answer)
    for loaded in (medusa, medusa.backbone):
        with pytest.raises(UserError, match="pickle"):
            pickle.dumps(loaded)


def test_keyword_arguments_are_the_options_fields() -> None:
    assert get_type_hints(OptionFields) == get_type_hints(GenerationOptions)
    assert not OptionFields.__required_keys__


def test_importing_the_package_does_not_import_torch() -> None:
    python("import sys, medusa_cli; assert 'torch' not in sys.modules", check=True)
    with pytest.raises(ImportError):
        from medusa_cli import nothing_of_the_kind  # noqa: F401
