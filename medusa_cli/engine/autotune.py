"""What this machine is fast at: steps of a model's shape timed once by kernel, and kept."""

import copy
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from medusa_cli.assets import home
from medusa_cli.engine.fast import FastEngine
from medusa_cli.engine.kernels import BITS, Kernel, kernel_named
from medusa_cli.engine.plan import Plan
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.load import limited
from medusa_cli.runs.io import read_object, write_json

KERNELS = ("fp16-weights", "fp32", "bf16", "int8", "int4")
ROWS = (1, 4, 6, 8, 12, 16, 32, 64)
# The first two of a few rows are run before the pass is traced; many rows gain nothing by that.
LAPS, MANY, MANY_LAPS = 4, 16, 2
# Tokens in the cache of the steps that are timed.
CONTEXT = 192
# Weights that one round reads, so that none of them waits in a processor's cache: more than those hold.
ROUND_BYTES = 64 * 2**20
# Tokens a step by the rows of its tree, as a fair drafter accepts them: what a row's cost is weighed against.
EXPECTED = {1: 1.0, 4: 1.65, 6: 1.8, 8: 1.9, 12: 2.05, 16: 2.15, 32: 2.35, 64: 2.5}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelTimings:
    """Seconds of a step over so many rows, by kernel."""

    seconds: Mapping[str, Mapping[int, float]]

    def cost(self, kernel: str, rows: int | None) -> float:
        """Seconds a token: over the size of tree that pays best, or for `rows` sequences side by side."""
        curve = self.seconds[kernel]
        if rows is not None:
            near = min(curve, key=lambda one: abs(one - rows))
            return curve[near] / near
        return min(seconds / EXPECTED[count] for count, seconds in curve.items())


def fastest(kernels: Sequence[Kernel], config: Any, rows: int | None = None) -> Kernel:
    """The kernel that costs least a token for a model of this config, by what was measured here before, or now."""
    found = measured([kernel.name for kernel in kernels], config)
    known = [kernel for kernel in kernels if kernel.name in found.seconds]
    return min(known or kernels[:1], key=lambda one: found.cost(one.name, rows) if known else 0.0)


# The thread that times computes or spins all the while; where it ran for less of the time (of more than so many
# seconds), the times are those of a busy machine and hold for this process alone, unless they were asked for.
UNDISTURBED, SHORT = 0.8, 0.2
_disturbed: dict[tuple[Path, str], dict[str, Any]] = {}


def measured(names: Sequence[str], config: Any, again: bool = False) -> KernelTimings:
    """The times of kernels on a model's shapes: kept ones, or, where there are none for this machine, new ones."""
    key, path = machine_key(config), machine_file()
    kept = {} if again else {**_read(path).get(key, {}), **_disturbed.get((path, key), {})}
    missing = [name for name in names if name not in kept or not kept[name]]
    if missing:
        log.info("timing how this machine multiplies, once for models of this shape (%s)", ", ".join(missing))
        wall, own = time.perf_counter(), time.thread_time()
        fresh = _times(missing, config)
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        kept = {**kept, **fresh}
        busy = wall > SHORT and own < UNDISTURBED * wall
        if busy:
            then = "time it once more without them" if again else "the next start times it anew"
            log.warning("other programs took much of the processor while it was timed; %s", then)
        if busy and not again:
            _disturbed[path, key] = kept
        else:
            _keep(path, key, kept)
    return KernelTimings({name: {int(rows): s for rows, s in kept[name].items()} for name in names if kept.get(name)})


def arithmetic() -> float:
    """Floating-point operations a second of large fp32 products, the best of five."""
    side, best = 1024, float("inf")
    one = torch.randn(side, side)
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def machine_file() -> Path:
    return home() / "machine.json"


def machine_key(config: Any) -> str:
    """What the times hang on: processor, threads, what of it may be used, version of torch, shape of the model."""
    shape = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
        config.vocab_size,
    )
    can = torch.backends.cpu.get_cpu_capability() + ("/limited" if limited() else "")
    return "|".join((processor(), can, str(torch.get_num_threads()), torch.__version__, "x".join(map(str, shape))))


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next((name for name in names if not name.isdigit()), platform.processor() or platform.machine())


def _read(path: Path) -> dict[str, Any]:
    """The kept times by machine; nothing where there is no file, or none that can be used."""
    if not path.is_file():
        return {}
    try:
        found = read_object(path, "the machine's file").get("kernels", {})
        for by_kernel in found.values():
            for curve in by_kernel.values():
                if curve and not all(0 < float(seconds) < 1e4 and int(rows) in ROWS for rows, seconds in curve.items()):
                    raise ValueError("a time is none")
        return dict(found)
    except (UserError, AttributeError, TypeError, ValueError) as reason:
        log.warning("%s cannot be used and is measured anew (%s)", path, str(reason).split(";")[0])
        return {}


def _keep(path: Path, key: str, found: dict[str, Any]) -> None:
    """Keep times beside those of other shapes; a cache that cannot be written is done without."""
    try:
        write_json(path, {"kernels": {**_read(path), key: found}})
    except OSError as reason:
        log.warning("what was measured of this machine cannot be kept: %s", reason.strerror)


def _times(names: Sequence[str], config: Any) -> dict[str, dict[str, float]]:
    """Seconds of a step of a model of this shape, by kernel and rows; {} for a kernel that cannot be had.

    A few layers with random weights are timed by the very engine that decodes, and stand for all of them.
    """
    small, layers, share = _part(config)
    found: dict[str, dict[str, float]] = {}
    with torch.random.fork_rng(devices=[]):
        made = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, trust_remote_code=False)
    for name in names:
        kind = torch.bfloat16 if name in ("bf16", *BITS) else torch.float32
        try:
            engine = FastEngine(Backbone(copy.deepcopy(made)), kernel_named(name, kind))
        except (Unsupported, UserError, RuntimeError, KeyError) as reason:
            log.debug("%s cannot be timed: %s", name, reason)
            found[name] = {}
            continue
        found[name] = _steps(engine, config.num_hidden_layers / layers, share)
    return found


def _part(config: Any) -> tuple[Any, int, float]:
    """A model of a few of the layers and part of the vocabulary, how many layers, and how many such vocabularies."""
    small = copy.deepcopy(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * dim * (config.num_attention_heads + config.num_key_value_heads)
    a_layer = 2 * config.hidden_size * (attention + 3 * config.intermediate_size)
    layers = max(1, min(config.num_hidden_layers, -(-ROUND_BYTES // a_layer)))
    small.num_hidden_layers = layers
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:layers]
    small.vocab_size = min(config.vocab_size, max(4096, ROUND_BYTES // (2 * config.hidden_size)))
    small.tie_word_embeddings = True
    small.pad_token_id = None
    return small, layers, config.vocab_size / small.vocab_size


@torch.inference_mode()
def _steps(engine: FastEngine, layers: float, vocabularies: float) -> dict[str, float]:
    """Seconds of a step by rows, of so many times the engine's layers and its vocabulary.

    The least of some laps: what else a machine does only ever adds. All are run after the same few tokens, as a tree's
    rows stay in the cache only where they are kept.
    """
    cache, found = engine.new_cache(), {}
    ids = torch.arange(CONTEXT) % engine.backbone.vocab_size
    engine.forward(Plan.chain(ids, logits="none"), cache)
    for rows in ROWS:
        tree = torch.ones(rows, dtype=torch.long), torch.eye(rows, dtype=torch.bool)
        plan = Plan(ids[None, :rows], *tree, logits="none")
        states = torch.randn(1, rows, engine.backbone.hidden_size, dtype=engine.dtype)
        body, head = [], []
        for _ in range(LAPS if rows <= MANY else MANY_LAPS):
            start = time.perf_counter()
            engine.forward(plan, cache)
            middle = time.perf_counter()
            engine.logits(states)
            body.append(middle - start)
            head.append(time.perf_counter() - middle)
        found[str(rows)] = min(body) * layers + min(head) * vocabularies
    return found
