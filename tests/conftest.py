"""Set-up of all tests: one thread, no fetching, a cache folder apart; tests marked gpu need CUDA."""

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Set before torch is imported. Two threads that wait for each other are many times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is fetched, here or in a process that a test starts: pip has no index, and the hub is a closed port.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
os.environ.pop("PIP_FIND_LINKS", None)
# Triton reads it when it is first imported, which torch may do. Without a GPU, only its interpreter can run kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# A shell lets what it runs in the background ignore Ctrl-C, and so the commands that tests interrupt.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps timings of the machine beside pytest's cache; fetched files are read in their place."""
    # One of several processes, which inherits the first one's folder.
    if hasattr(config, "workerinput"):
        return
    from medusa_cli.files.paths import home

    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    fetched, apart = (
        home(),
        Path(cache.mkdir("home") if cache else tempfile.mkdtemp(prefix="medusa-home-")),
    )
    for name in ("downloads", "files", "models"):
        link = apart / name
        # An earlier session may have left a link to another cache, or a folder of its own.
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        if (fetched / name).is_dir():
            link.symlink_to((fetched / name).resolve())
    os.environ["MEDUSA_HOME"] = str(apart)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            functions.setdefault((item.path, item.originalname), []).append(item)
    for cases in functions.values():
        for case in set(cases) - set(quick_cases(cases)):
            case.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and the tests, which stay: a collection would take half a second."""
    gc.collect()
    gc.freeze()


def quick_cases(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Returns those cases of a test marked `quick` that it names, or else as few as hold each value once."""
    mark = cases[0].get_closest_marker("quick")
    assert mark is not None
    if mark.args:
        unknown = {*mark.args} - {case.callspec.id for case in cases}
        # Of cases that are named on the command line, the others are not here.
        if unknown and len(cases) > len(mark.args):
            raise pytest.UsageError(f"{cases[0].nodeid} has no case {sorted(unknown)}")
        return [case for case in cases if case.callspec.id in mark.args]
    chosen: list[pytest.Function] = []
    seen: set[tuple[str, str]] = set()
    for is_wanted in (all, any):
        for case in cases:
            values = {(name, repr(value)) for name, value in case.callspec.params.items()}
            if case not in chosen and is_wanted(value not in seen for value in values):
                chosen.append(case)
                seen |= values
    return chosen


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """Undoes --quiet and --json of the command that ran before."""
    from medusa_cli import console

    console.configure()
    yield
    console.configure()


@pytest.fixture(autouse=True, scope="session")
def hurried() -> Iterator[None]:
    """Times steps in few rounds and memory by small copies: no test needs good figures."""
    from medusa_cli.bench.steps import time_rows
    from medusa_cli.decode.step_times import measure_step_times

    with pytest.MonkeyPatch.context() as patch:
        for measure in (time_rows, measure_step_times):
            patch.setitem(measure.__kwdefaults__, "rounds", 1)
        patch.setattr("medusa_cli.device.COPIED_BYTES", 1 << 22)
        yield


@pytest.fixture(autouse=True, scope="session")
def steady() -> Iterator[None]:
    """Lets each step report a duration by its number of nodes, so that no choice follows the machine's load."""
    from medusa_cli.decode import decoder

    step = decoder.Step

    def timed(*given: Any, nodes: int = 1, **more: Any) -> Any:
        times = {"draft_s": 1e-5 * (nodes - 1), "verify_s": 1e-3 * (1 + nodes / 64)}
        return step(*given, nodes=nodes, **more | times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "Step", timed)
        yield


@pytest.fixture(autouse=True, scope="session")
def verified_once() -> Iterator[None]:
    """Compares a network with its twin once in a process for each config and description."""
    from medusa_cli.engine import description_cache, load
    from medusa_cli.engine.describe import describe
    from medusa_cli.engine.twin import verified

    known = set[tuple[type, str, str]]()

    def verify(network: Any) -> Any:
        try:
            description = describe(network)
        except Exception:  # `verified` says what it means
            return verified(network)
        key = (type(network), network.config.to_json_string(use_diff=False), repr(description))
        if key not in known:
            verified(network)
            known.add(key)
        return description

    with pytest.MonkeyPatch.context() as patch:
        for module in (description_cache, load):
            patch.setattr(module, "verified", verify)
        yield


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays no curves out, which takes longer than training a tiny model; tests of pictures are marked `drawn`."""
    if request.node.get_closest_marker("drawn"):
        return
    from matplotlib.figure import Figure

    save = Figure.savefig

    def empty(self: Figure, file: Any, **how: Any) -> None:
        if how.get("format") == "png":
            Path(file).write_bytes(b"")
        else:
            save(self, file, **how)

    monkeypatch.setattr(Figure, "savefig", empty)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuses to fetch or to write to the cache, which is empty; returns what was asked for."""
    from huggingface_hub import HfApi

    from medusa_cli.files import fetch, model_source

    wanted: list[str] = []

    def refuse(*words: Any, **_: Any) -> None:
        wanted.append(str(words))
        raise OSError("there is no network, and the cache cannot be written")

    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "no-cache"))
    for name in ("build_once", "_download", "_from_hub"):
        monkeypatch.setattr(fetch, name, refuse)
    monkeypatch.setattr(model_source, "build_once", refuse)
    for name in ("repo_info", "snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(HfApi, name, refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    return wanted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of a tiny Llama, whose files no test changes."""
    from tests.helpers import save_model

    return save_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def backbone(model: str) -> Any:
    """Returns the module's model in fp32 on the eager engine."""
    from medusa_cli.engine import load_backbone
    from medusa_cli.runs.load_options import LoadOptions

    return load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets drafters draft over the weights that they are trained in, not over 8 bits."""
    monkeypatch.setattr("medusa_cli.native.is_available", lambda: False)


@pytest.fixture
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the drafters' weights as they are, so that their drafts can be compared exactly."""
    from medusa_cli.engine.linear import PlainLinear

    monkeypatch.setattr("medusa_cli.drafters.scoring.packs", lambda device: False)
    monkeypatch.setattr(
        "medusa_cli.drafters.scoring.packed_linear",
        lambda weight, bias=None, pack=None: PlainLinear(weight.detach(), bias),
    )


@pytest.fixture
def restored() -> Iterator[None]:
    """Gives the native library the instructions and threads back that it had."""
    from medusa_cli.native import cpu_count, instruction_set, library

    wanted = instruction_set()
    yield
    assert library().use(wanted.encode()) == 0
    library().threads(cpu_count())
