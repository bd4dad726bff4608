"""Times kernels on this machine, and keeps timings of kernels and of decoding steps in one file."""

import copy
import logging
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from transformers import AutoModelForCausalLM

from medusa_cli.assets import home
from medusa_cli.engine.cache import Cache
from medusa_cli.engine.fast import FastEngine
from medusa_cli.engine.kernels import Kernel
from medusa_cli.engine.plan import Plan, lay_out
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.checks import FAULTS
from medusa_cli.model.load import limited
from medusa_cli.runs.io import read_object, write_json

# Seconds by size (rows, nodes, levels), and those by name of what was timed.
Curve = Mapping[Annotated[int, Meta(ge=1, le=1024)], Annotated[float, Meta(gt=0, lt=1e4)]]
Timings = dict[str, Curve]
T = TypeVar("T")
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
LAPS, FEW, LONG_LAPS = 6, 16, 3
# No lap begins after so many seconds, as on a busy machine, once there were MIN_LAPS.
BUDGET, MIN_LAPS = 10.0, 2
# Tokens in the cache of the steps that are timed.
CONTEXT = 192
# Bytes of weights that a lap reads at least: more than a processor's cache holds. And those of its lm_head.
LAP_BYTES, HEAD_BYTES = 64 * 2**20, 8 * 2**20
# A timing thread computes or spins all the while. If it ran for a smaller share of the time, the machine was busy, and
# it is timed again after so many seconds: not at each start, which takes longest on a busy machine.
UNDISTURBED, RETRY_AFTER = 0.8, 3600
# A kernel takes the place of the one chosen before if its cost is below this share of the other's.
GAIN = 0.95
# Bytes copied to measure the memory's bandwidth.
COPIED_BYTES = 256 * 2**20
# Its first line names NVIDIA's driver.
DRIVER = Path("/proc/driver/nvidia/version")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelTimings:
    """The least seconds of a step by kernel and rows; {} for a kernel that cannot be had.

    choices: the kernel taken, by the question that it answers. variant: the kernels under which a row's bits depend on
    the rows beside it. busy: when a busy machine measured them, in seconds since 1970, else None.
    """

    seconds: Timings = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    variant: tuple[str, ...] = ()
    busy: float | None = None


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


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes a second, read and written, that a plain copy moves."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / best_time(device, lambda: target.copy_(source))


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timings_file() -> Path:
    return home() / "timings.json"


def read_timings(key: str, kind: type[T]) -> T | None:
    """Returns the kept timings of a key; None if there are none, or the file is damaged."""
    try:
        kept = _read_file().get(key)
        return None if kept is None else msgspec.convert(kept, kind, str_keys=True)
    except (UserError, ValueError, OverflowError) as reason:
        log.warning("%s cannot be used; timings are measured anew (%s)", timings_file(), str(reason).split(";")[0])
        return None


def keep_timings(key: str, timings: Any) -> None:
    """Keeps a record of timings beside other keys'; without a writable file they are measured again next time."""
    kept: dict[str, Any] = {}
    with suppress(UserError):  # a damaged file is replaced
        kept = _read_file()
    try:
        write_json(timings_file(), {**kept, key: msgspec.to_builtins(timings, str_keys=True)})
    except OSError as reason:
        log.warning("timings cannot be kept in %s: %s", timings_file(), reason.strerror)


def watched(measure: Callable[[], T]) -> tuple[T, float | None]:
    """Returns a measurement, and the time if other programs took much of the processor meanwhile, else None."""
    wall, own = time.perf_counter(), time.thread_time()
    measurement = measure()
    busy = time.thread_time() - own < UNDISTURBED * (time.perf_counter() - wall)
    return measurement, time.time() if busy else None


def is_doubtful(busy: float | None) -> bool:
    """Returns True for timings of a machine that was busy at this time, if that is long enough ago to time it again."""
    return busy is not None and not 0 <= time.time() - busy < RETRY_AFTER


def _read_file() -> dict[str, Any]:
    return read_object(timings_file(), "the timings") if timings_file().is_file() else {}


def machine_key(config: Any) -> str:
    """Returns the key of timings: processor, its instructions, threads, version of torch, shape of the model."""
    shape = [config.model_type, *(getattr(config, name, None) for name in SHAPE)]
    can = torch.backends.cpu.get_cpu_capability() + ("/limited" if limited() else "")
    return "|".join((processor(), can, str(torch.get_num_threads()), torch.__version__, "x".join(map(str, shape))))


def device_name(device: torch.device) -> str:
    """Returns a device's name for keys of timings; that of a GPU says its kind, its memory and its driver."""
    if device.type != "cuda":
        return str(device)
    facts, driver = torch.cuda.get_device_properties(device), ""
    with suppress(OSError):
        driver = DRIVER.read_text().partition("\n")[0]
    return f"{facts.name}, {facts.total_memory >> 20} MiB, {driver}, CUDA {torch.version.cuda}"


def processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next((name for name in names if not name.isdigit()), platform.processor() or platform.machine())


def fastest(kernels: Sequence[Kernel], config: Any, rows: int | None = None) -> Kernel:
    """Returns the kernel with the least cost a token for a model of this config; the first one if none can be timed.

    Kernels whose rows do not depend on each other come first: greedy output over drafts is then plain decoding's. The
    choice stays the same from then on, unless a later measurement shows one that is clearly faster.
    """
    kept = kernel_timings([kernel.name for kernel in kernels], config)
    costs = {kernel: cost(curve, rows) for kernel in kernels if (curve := kept.seconds.get(kernel.name))}
    if not costs:
        return kernels[0]
    costs = {kernel: cost for kernel, cost in costs.items() if kernel.name not in kept.variant} or costs
    best = min(costs, key=lambda kernel: costs[kernel])
    question = f"{rows or 'a few'} rows: {', '.join(kernel.name for kernel in kernels)}"
    chosen = next((kernel for kernel in costs if kernel.name == kept.choices.get(question)), None)
    if chosen is not None and costs[best] > GAIN * costs[chosen]:
        return chosen
    if best is not chosen:
        keep_timings(_kernel_key(config), replace(kept, choices={**kept.choices, question: best.name}))
    return best


def cost(curve: Mapping[int, float], rows: int | None) -> float:
    """Returns seconds a token, with the tree that pays best, or for `rows` sequences side by side."""
    if rows is not None:
        near = min(curve, key=lambda count: abs(count - rows))
        return curve[near] / near
    return min(seconds / EXPECTED[count] for count, seconds in curve.items() if count in EXPECTED)


def kernel_timings(names: Sequence[str], config: Any, again: bool = False) -> KernelTimings:
    """Returns what is kept for models of a shape, after a measurement if kernels are missing or timings are doubtful.

    again: measures in any case.
    """
    key = _kernel_key(config)
    kept = read_timings(key, KernelTimings) or KernelTimings()
    if not (again or is_doubtful(kept.busy)) and all(name in kept.seconds for name in names):
        return kept
    log.info("timing how this machine multiplies, once for models of this shape (%s)", ", ".join(names))
    (seconds, variant), busy = watched(lambda: time_kernels(names, config))
    others = {*kept.variant} - {*names}
    kept = KernelTimings({**kept.seconds, **seconds}, kept.choices, tuple(sorted({*variant} | others)), busy)
    keep_timings(key, kept)
    return kept


def _kernel_key(config: Any) -> str:
    return f"kernels|{machine_key(config)}"


def time_kernels(names: Iterable[str], config: Any) -> tuple[Mapping[str, Curve], list[str]]:
    """Returns seconds of a step of a model of this shape by kernel and rows; {} for a kernel that cannot be had.

    Also returns the kernels that are not row-invariant. A few layers with random weights, run by the fast engine, stand
    for all of them. Kernels take turns, so that a disturbance meets all of them. Disturbances only add, so the least
    times count.
    """
    timings: dict[str, dict[int, float]] = {name: {} for name in names}
    parts: dict[tuple[str, int], tuple[float, float]] = {}
    engines: list[tuple[FastEngine, Cache]] = []
    try:
        small, layers, vocabularies = _part_of(config)
        with torch.random.fork_rng(devices=[]):
            network = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, trust_remote_code=False)
    except FAULTS as reason:
        log.debug("the model cannot be timed: %s", reason)
        return timings, []
    for name in timings:
        try:
            engine = FastEngine(Backbone(copy.deepcopy(network)), Kernel(name))
        except (Unsupported, UserError, *FAULTS) as reason:
            log.debug("%s cannot be timed: %s", name, reason)
            continue
        engines.append((engine, engine.new_cache()))
        engine.forward(Plan.chain(_ids(engine, CONTEXT), logits="none"), engines[-1][1])
    started = time.perf_counter()
    for lap in range(LAPS):
        if lap >= MIN_LAPS and time.perf_counter() - started > BUDGET:
            break
        for rows in EXPECTED:
            for engine, cache in engines if rows <= FEW or lap < LONG_LAPS else ():
                layer, head = time_step(engine, cache, rows)
                before = parts.get((engine.kernel.name, rows), (layer, head))
                parts[engine.kernel.name, rows] = min(layer, before[0]), min(head, before[1])
    for (name, rows), (layer, head) in parts.items():
        timings[name][rows] = layer * layers + head * vocabularies
    return timings, [engine.kernel.name for engine, _ in engines if not engine.row_invariant]


def _ids(engine: FastEngine, count: int) -> Tensor:
    return torch.arange(count) % engine.backbone.vocab_size


@torch.inference_mode()
def time_step(engine: FastEngine, cache: Cache, rows: int) -> tuple[float, float]:
    """Returns the seconds of a layer and of the lm_head for a tree of `rows` rows behind the cache's tokens.

    The fastest of the layers counts: each takes so short that some run between two turns of another program. They run
    one after the other, so that none finds its weights in a processor's cache.
    """
    depth, tree_mask = torch.ones(rows, dtype=torch.long), torch.eye(rows, dtype=torch.bool)
    plan, device = Plan(_ids(engine, rows)[None], depth, tree_mask), engine.backbone.device
    layout = lay_out(plan, cache, engine.masks, engine.backbone.max_positions, device, engine.round_to)
    states = torch.randn(1, rows, engine.backbone.hidden_size, dtype=engine.dtype)
    inputs = engine.inputs(rows, layout)
    a_layer = min(
        best_time(device, partial(engine.run_layers, index, index + 1, states, layout, cache, *inputs), 1)
        for index in range(len(engine.layers))
    )
    return a_layer, best_time(device, partial(engine.logits, states), 1)


def _part_of(config: Any) -> tuple[Any, int, float]:
    """Returns the config of a part of a model, the model's layers, and its vocabulary as a multiple of the part's."""
    small = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * dim * (config.num_attention_heads + config.num_key_value_heads)
    a_layer = 2 * config.hidden_size * (attention + 3 * config.intermediate_size)
    layers = max(1, min(config.num_hidden_layers, -(-LAP_BYTES // a_layer)))
    small.num_hidden_layers = layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    small.vocab_size = min(config.vocab_size, max(4096, HEAD_BYTES // (2 * config.hidden_size)))
    small.tie_word_embeddings = True
    small.pad_token_id = None
    return small, config.num_hidden_layers, config.vocab_size / small.vocab_size
