"""Times kernels on this machine, and keeps timings of kernels and of decoding steps in one file."""

import copy
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from medusa_cli.assets import home
from medusa_cli.engine.fast import FastEngine
from medusa_cli.engine.kernels import Kernel
from medusa_cli.engine.plan import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import limited
from medusa_cli.runs.io import read_object, write_json

# Seconds by size (rows, nodes, levels), by name of what was timed.
Timings = Mapping[str, Mapping[int, float]]
# Expected tokens a step by rows of the tree, with a fair drafter: the weight of a row's cost.
EXPECTED = {1: 1.0, 4: 1.65, 6: 1.8, 8: 1.9, 12: 2.05, 16: 2.15, 32: 2.35, 64: 2.5}
# The fields of a config that a step's time depends on; some families lack some.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
)
# Laps of few rows, of which two run before the pass is traced; many rows gain nothing by that.
LAPS, FEW, LONG_LAPS = 4, 16, 2
# Tokens in the cache of the steps that are timed.
CONTEXT = 192
# Bytes of weights that a lap reads at least: more than a processor's cache holds.
LAP_BYTES = 64 * 2**20
MAX_SIZE = 1024  # of kept timings: rows, nodes or levels
# A timing thread computes or spins all the while. If it ran for a smaller share of the time (of more than so many
# seconds), the machine was busy: the times are not kept, unless they were asked for.
UNDISTURBED, SHORT = 0.8, 0.2
_disturbed: dict[tuple[Path, str], Timings] = {}
log = logging.getLogger(__name__)


def best_time(device: torch.device, work: Callable[[], object], laps: int = 6) -> float:
    """Returns the seconds of the fastest lap: disturbances of a machine only add, and the first lap warms up."""
    best = float("inf")
    for _ in range(laps):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timings_file() -> Path:
    return home() / "timings.json"


def read_timings(key: str) -> dict[str, dict[int, float]]:
    """Returns the kept timings of a key; none if there are none, or the file is damaged."""
    try:
        kept = _read_file().get(key, {})
        timings = {name: {int(size): float(s) for size, s in curve.items()} for name, curve in kept.items()}
        if not all(0 < size <= MAX_SIZE and 0 < s < 1e4 for curve in timings.values() for size, s in curve.items()):
            raise ValueError("a size or time is out of range")
        return timings
    except (UserError, AttributeError, TypeError, ValueError) as reason:
        log.warning("%s cannot be used; timings are measured anew (%s)", timings_file(), str(reason).split(";")[0])
        return {}


def keep_timings(key: str, timings: Timings) -> None:
    """Keeps timings beside those of other keys; without a writable file they are measured again next time."""
    kept: dict[str, Any] = {}
    with suppress(UserError):  # a damaged file is replaced
        kept = _read_file()
    try:
        write_json(timings_file(), {**kept, key: {name: dict(curve) for name, curve in timings.items()}})
    except OSError as reason:
        log.warning("timings cannot be kept in %s: %s", timings_file(), reason.strerror)


def _read_file() -> dict[str, Any]:
    return read_object(timings_file(), "the timings") if timings_file().is_file() else {}


def machine_key(config: Any) -> str:
    """Returns the key of timings: processor, its instructions, threads, version of torch, shape of the model."""
    shape = [config.model_type, *(getattr(config, name, None) for name in SHAPE)]
    can = torch.backends.cpu.get_cpu_capability() + ("/limited" if limited() else "")
    return "|".join((processor(), can, str(torch.get_num_threads()), torch.__version__, "x".join(map(str, shape))))


def processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next((name for name in names if not name.isdigit()), platform.processor() or platform.machine())


def fastest(kernels: Sequence[Kernel], config: Any, rows: int | None = None) -> Kernel:
    """Returns the kernel with the least cost a token for a model of this config; the first one if none can be timed."""
    timings = kernel_timings([kernel.name for kernel in kernels], config)
    timed = [kernel for kernel in kernels if kernel.name in timings]
    return min(timed, key=lambda kernel: cost(timings[kernel.name], rows)) if timed else kernels[0]


def cost(curve: Mapping[int, float], rows: int | None) -> float:
    """Returns seconds a token, with the tree that pays best, or for `rows` sequences side by side."""
    if rows is not None:
        near = min(curve, key=lambda count: abs(count - rows))
        return curve[near] / near
    return min(seconds / EXPECTED[count] for count, seconds in curve.items() if count in EXPECTED)


def kernel_timings(names: Sequence[str], config: Any, again: bool = False) -> Timings:
    """Returns the timings of kernels on a model's shapes, kept or new; kernels that cannot be had are left out."""
    key, path = machine_key(config), timings_file()
    kept = {} if again else {**read_timings(key), **_disturbed.get((path, key), {})}
    missing = [name for name in names if not kept.get(name)]
    if missing:
        log.info("timing how this machine multiplies, once for models of this shape (%s)", ", ".join(missing))
        wall, own = time.perf_counter(), time.thread_time()
        kept = {**kept, **time_kernels(missing, config)}
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        busy = wall > SHORT and own < UNDISTURBED * wall
        if busy:
            then = "time it once more without them" if again else "the next start times it anew"
            log.warning("other programs took much of the processor while it was timed; %s", then)
        if busy and not again:
            _disturbed[path, key] = kept
        else:
            keep_timings(key, kept)
    return {name: kept[name] for name in names if kept.get(name)}


def time_kernels(names: Sequence[str], config: Any) -> dict[str, dict[int, float]]:
    """Returns seconds of a step of a model of this shape by kernel and rows; {} for a kernel that cannot be had.

    A few layers with random weights, run by the fast engine, stand for all of them.
    """
    small, layers, vocabularies = _part_of(config)
    timings: dict[str, dict[int, float]] = {}
    with torch.random.fork_rng(devices=[]):
        network = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, trust_remote_code=False)
    for name in names:
        try:
            engine = FastEngine(Backbone(copy.deepcopy(network)), Kernel(name))
        except (Unsupported, UserError, RuntimeError, KeyError) as reason:
            log.debug("%s cannot be timed: %s", name, reason)
            timings[name] = {}
            continue
        timings[name] = _time_steps(engine, layers, vocabularies)
    return timings


def _part_of(config: Any) -> tuple[Any, float, float]:
    """Returns the config of a part of a model, and the model's layers and vocabulary as multiples of the part's."""
    small = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * dim * (config.num_attention_heads + config.num_key_value_heads)
    a_layer = 2 * config.hidden_size * (attention + 3 * config.intermediate_size)
    layers = max(1, min(config.num_hidden_layers, -(-LAP_BYTES // a_layer)))
    small.num_hidden_layers = layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    small.vocab_size = min(config.vocab_size, max(4096, LAP_BYTES // (2 * config.hidden_size)))
    small.tie_word_embeddings = True
    small.pad_token_id = None
    return small, config.num_hidden_layers / layers, config.vocab_size / small.vocab_size


@torch.inference_mode()
def _time_steps(engine: FastEngine, layers: float, vocabularies: float) -> dict[int, float]:
    """Returns seconds of a step by rows, for so many times the engine's layers and vocabulary.

    All steps follow the same few tokens: a tree's rows stay in the cache only if they are kept.
    """
    cache, device = engine.new_cache(), engine.backbone.device
    ids = torch.arange(CONTEXT) % engine.backbone.vocab_size
    engine.forward(Plan.chain(ids, logits="none"), cache)
    seconds = {}
    for rows in EXPECTED:
        depth, sees = torch.ones(rows, dtype=torch.long), torch.eye(rows, dtype=torch.bool)
        plan = Plan(ids[None, :rows], depth, sees, logits="none")
        states = torch.randn(1, rows, engine.backbone.hidden_size, dtype=engine.dtype)
        # In turns, so that neither finds its weights in a processor's cache.
        body, head = [], []
        for _ in range(LAPS if rows <= FEW else LONG_LAPS):
            body.append(best_time(device, partial(engine.forward, plan, cache), 1))
            head.append(best_time(device, partial(engine.logits, states), 1))
        seconds[rows] = min(body) * layers + min(head) * vocabularies
    return seconds
