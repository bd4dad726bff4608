"""Faithfulness and time of keys and values in fewer bits, against those in fp32.

    python -m tests.bench.kv [MODEL] [--activations fp32] [--positions N] [--contexts N,N] [--text FILE ...]

Prints the mean and largest KL of the next token's distribution over the positions of a text, how often both take the
same greedy token, and the milliseconds of processor time that one thread takes for a step of 1, 8 and 64 rows after
each context. The text is this project's documentation unless files are given. With --activations int8, any difference
grows to that of rounding activations.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from medusa_cli.engine import Plan, load_backbone
from medusa_cli.engine.kv_types import KV_TYPES
from medusa_cli.engine.native_engine import NativeEngine
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.model import Backbone
from medusa_cli.native import library
from medusa_cli.runs.load_options import LoadOptions

PIECE = 250
ROWS = (1, 8, 64)
REPEATS = 5


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    words.add_argument("--activations", default="fp32")
    words.add_argument("--positions", type=int, default=2000)
    words.add_argument("--contexts", default="1024,8192,16384")
    docs = Path(__file__).parent.parent.parent / "docs"
    words.add_argument("--text", nargs="+", type=Path, default=sorted(docs.glob("*.md")))
    given = words.parse_args()
    backbone = load_backbone(given.model, LoadOptions(activations=given.activations))
    engines = dict(engines_of(backbone))
    text = "".join(path.read_text(encoding="utf-8") for path in given.text)
    if given.positions:
        compare(backbone, engines, text, given.positions)
    for context in map(int, given.contexts.split(",") if given.contexts else ()):
        for kv, engine in engines.items():
            times = (f"{step_ms(engine, context, rows):.1f}" for rows in ROWS)
            print(f"{context:6} tokens, {kv}: {' / '.join(times)} ms a step of {ROWS} rows")


def engines_of(backbone: Backbone) -> Iterator[tuple[str, NativeEngine]]:
    """Yields an engine for each type, over the same weights."""
    own = backbone.engine
    assert isinstance(own, NativeEngine)
    for kv in KV_TYPES:
        yield kv, NativeEngine(backbone, own.model, own.int8_rows, own.quantize, kv)


@torch.inference_mode()
def compare(
    backbone: Backbone, engines: dict[str, NativeEngine], text: str, positions: int
) -> None:
    tokens = torch.tensor(backbone.tokenizer(text)["input_ids"][:positions])
    caches = {kv: engine.new_cache(1, positions) for kv, engine in engines.items()}
    kl: dict[str, list[torch.Tensor]] = {kv: [] for kv in engines}
    same = dict.fromkeys(engines, 0)
    for piece in tokens.split(PIECE):
        exact: torch.Tensor | None = None
        for kv, engine in engines.items():
            logits = engine.forward(Plan.chain(piece, logits="all"), caches[kv]).logits
            assert logits is not None
            own = logits[0].double().log_softmax(-1)
            exact = own if exact is None else exact
            kl[kv].append((exact.exp() * (exact - own)).sum(-1))
            same[kv] += int((own.argmax(-1) == exact.argmax(-1)).sum())
    for kv, engine in engines.items():
        each = torch.cat(kl[kv])
        print(
            f"{kv}: {engine.row_bytes:,} bytes a token, KL mean {each.mean():.2e}, largest {each.max():.2e}, "
            f"same token {same[kv] / len(tokens):.4f} of {len(tokens)}"
        )


@torch.inference_mode()
def step_ms(engine: NativeEngine, context: int, rows: int) -> float:
    cache = engine.new_cache(1, context + rows)
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, engine.backbone.vocab_size, (rows,), generator=chance)
    engine.forward(Plan.chain(tokens, logits="none"), cache)
    assert cache.keys is not None
    assert cache.values is not None
    cache.keys.copy_(cache.keys)  # all pages are in memory
    cache.values.copy_(cache.values)
    times = []
    library().threads(1)
    for _ in range(REPEATS):
        cache.lengths[0] = context
        start = time.process_time()
        engine.forward(Plan.chain(tokens), cache)
        times.append(time.process_time() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    main()
