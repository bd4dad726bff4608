"""What another engine is held against: prompts, plain greedy tokens in fp32, and how often our own drafts stand.

python -m tests.engines.reference --run RUN --questions 8 --tokens 64 --depth 4 > reference.json
"""

import argparse
import json
import time

from medusa_cli import Medusa, assets
from medusa_cli.bench.questions import read_questions, spread
from medusa_cli.drafters import load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.model import Backbone
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.tree import Tree
from tests.helpers import generate, generate_plain

ENGINES = ("fast", "eager")


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("--model", default=assets.DEFAULT_MODEL)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--timed", action="store_true", help="also our own tokens/s with drafts, by engine")
    asked = parser.parse_args()
    run = Run.open(asked.run) if asked.run else None
    backbone = load_backbone(
        run.model or asked.model if run else asked.model, LoadOptions(dtype="fp32", engine="eager")
    )
    chosen = spread(read_questions(assets.mt_bench_path())[0], asked.questions)
    prompts = [backbone.encode_chat([{"role": "user", "content": one.turns[0]}]) for one in chosen]
    plain = [
        [token for step in generate_plain(backbone, prompt, max_new_tokens=asked.tokens) for token in step.tokens]
        for prompt in prompts
    ]
    rates = {engine: rate(asked, engine, prompts) for engine in ENGINES} if asked.timed else None
    ours = accepted(backbone, run, prompts, asked.tokens, asked.depth) if run else None
    folder = assets.model_dir(backbone.id)
    report = {"model": folder, "prompts": prompts, "tokens": plain, "depth": asked.depth, "accepted": ours}
    print(json.dumps({**report, "our_tokens_per_s": rates}))


def rate(asked: argparse.Namespace, engine: str, prompts: list[list[int]]) -> float:
    """Our own tokens/s with drafts, over all prompts, after one to warm up."""
    medusa = Medusa.from_pretrained(None if asked.run else asked.model, run=asked.run, dtype="fp32", engine=engine)
    medusa.generate(prompts[0], max_new_tokens=asked.tokens)
    began = time.perf_counter()
    count = sum(len(medusa.generate(prompt, max_new_tokens=asked.tokens).tokens) for prompt in prompts)
    return round(count / (time.perf_counter() - began), 2)


def accepted(backbone: Backbone, run: Run, prompts: list[list[int]], tokens: int, depth: int) -> list[float]:
    """The share of steps that accept at least 1, 2, .. drafts over a chain."""
    drafter, reached, steps = load_drafter(run.drafter_dir, backbone), [0] * depth, 0
    for prompt in prompts:
        for step in generate(backbone, drafter, Tree.chain(depth), prompt, max_new_tokens=tokens):
            if not step.prefill:
                steps += 1
                reached = [count + (step.accepted > place) for place, count in enumerate(reached)]
    return [count / steps for count in reached]


if __name__ == "__main__":
    main()
