"""The reference for other engines: prompts, plain greedy tokens in fp32, and how often our own drafts are accepted.

python -m tests.engines.reference --run RUN --questions 8 --tokens 64 --depth 4 > reference.json
"""

import argparse
import json
import time

from medusa_cli import Medusa
from medusa_cli.bench.questions import read_questions, spread
from medusa_cli.drafters import load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.files import catalogue, fetch
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.tree import Tree
from tests.helpers import generate, generate_plain

ENGINES = ("native", "eager")


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument(
        "--timed", action="store_true", help="also our own tokens/s with drafts, by engine"
    )
    args = parser.parse_args()
    run = Run.open(args.run) if args.run else None
    model = (run.model if run else None) or catalogue.DEFAULT_MODEL
    backbone = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    questions = spread(read_questions(fetch.mt_bench_path())[0], args.questions)
    prompts = [
        backbone.encode_chat([{"role": "user", "content": question.turns[0]}])
        for question in questions
    ]
    plain = [generate_plain(backbone, prompt, max_new_tokens=args.tokens) for prompt in prompts]
    reference = {
        "model": ModelSource.of(backbone.id).folder,
        "prompts": prompts,
        "tokens": [[token for step in steps for token in step.tokens] for steps in plain],
        "depth": args.depth,
        "accepted": accepted(backbone, run, prompts, args.tokens, args.depth) if run else None,
        "our_tokens_per_s": {e: rate(args.run, e, prompts, args.tokens) for e in ENGINES}
        if args.timed
        else None,
    }
    print(json.dumps(reference))


def rate(run: str | None, engine: str, prompts: list[list[int]], tokens: int) -> float:
    """Returns our own tokens/s with drafts over all prompts, after a warm-up."""
    medusa = Medusa.from_pretrained(run=run, dtype="fp32", engine=engine)
    medusa.generate(prompts[0], max_new_tokens=tokens)
    start = time.perf_counter()
    count = sum(len(medusa.generate(prompt, max_new_tokens=tokens).tokens) for prompt in prompts)
    return round(count / (time.perf_counter() - start), 2)


def accepted(
    backbone: Backbone, run: Run, prompts: list[list[int]], tokens: int, depth: int
) -> list[float]:
    """Returns the share of steps that accept at least 1, 2, .. draft tokens of a chain."""
    drafter, reached, steps = load_drafter(run.drafter_dir, backbone), [0] * depth, 0
    for prompt in prompts:
        for step in generate(backbone, drafter, Tree.chain(depth), prompt, max_new_tokens=tokens):
            if step.path:
                steps += 1
                reached = [
                    count + (step.accepted > position) for position, count in enumerate(reached)
                ]
    return [round(count / steps, 4) for count in reached]


if __name__ == "__main__":
    main()
