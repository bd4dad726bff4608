"""Answers by JSON schemas on the default model: they validate, drafts change no token, and what schemas and masks cost.

    python -m tests.bench.grammar [--schemas N] [--rounds N] [--seed N]

Prints tokens a second with drafts and without (greedy, the same tokens), the share of a step that masks take, and the
time that a schema takes to compile.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import jsonschema_rs

from medusa_cli.api import Medusa
from medusa_cli.decode import Answer
from medusa_cli.decode.grammar import Grammar, GrammarCompiler, GrammarProcessor
from medusa_cli.decode.processors import SequenceProcessors
from tests.schemas import QUESTIONS, random_schema

MAX_NEW_TOKENS = 400


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--schemas", type=int, default=100)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    drafted, plain = Medusa.from_pretrained(), Medusa.from_pretrained(drafter=None)
    print(drafted.loaded.description)
    follow(drafted, plain, given.schemas, given.seed)
    compare(drafted, plain, given.rounds)


def follow(drafted: Medusa, plain: Medusa, count: int, seed: int) -> None:
    """Answers by random schemas; prints how many answers validate, and how many greedy ones are the same."""
    chance, valid, same, cut, steps = random.Random(seed), 0, 0, 0, [0, 0]
    for number in range(count):
        schema = random_schema(chance)
        ask = f"Invent an example of JSON by this schema: {json.dumps(schema)}"
        rules: dict[str, Any] = {"json_schema": schema, "max_new_tokens": MAX_NEW_TOKENS}
        greedy = [medusa.generate(ask, **rules) for medusa in (drafted, plain)]
        sampled = drafted.generate(ask, **rules, temperature=1.0, seed=number)
        same += greedy[0].tokens == greedy[1].tokens
        steps = [steps[0] + greedy[0].stats.steps, steps[1] + greedy[1].stats.steps]
        for answer in (*greedy, sampled):
            cut += answer.finish_reason == "length"
            valid += validates(schema, answer)
    print(
        f"{count} schemas: {valid} of {3 * count} answers validate ({cut} cut off), {same} greedy ones are the same"
    )
    print(f"greedy steps: {steps[0]} with drafts, {steps[1]} without")


def validates(schema: dict[str, Any], answer: Answer) -> bool:
    try:
        jsonschema_rs.validate(schema, json.loads(answer.text))
    except ValueError as reason:  # of both
        print(f"{schema}: {answer.text!r}: {reason}")
        return False
    return True


def compare(drafted: Medusa, plain: Medusa, rounds: int) -> None:
    """Times answers with drafts and without, masks and compiling."""
    masks, compiles = [0.0], list[float]()

    def timed(method: Any) -> Any:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            masks[0] += time.perf_counter() - started
            return result

        return run

    GrammarProcessor.__call__ = timed(GrammarProcessor.__call__)  # type: ignore[method-assign]
    SequenceProcessors.forced = timed(SequenceProcessors.forced)  # type: ignore[method-assign]
    compiler, chance = GrammarCompiler(drafted.backbone), random.Random(0)
    for schema in [
        *(schema for _, schema in QUESTIONS),
        *(random_schema(chance) for _ in range(100)),
    ]:
        started = time.perf_counter()
        compiler.matcher(Grammar.of(json_schema=schema)).deep_copy().compute_bitmask()
        compiles.append(1e3 * (time.perf_counter() - started))
    print(f"compile: median {statistics.median(compiles):.2f} ms, largest {max(compiles):.2f} ms")
    for medusa in (drafted, plain):  # warm
        medusa.generate(QUESTIONS[0][0], json_schema=QUESTIONS[0][1], max_new_tokens=40)
    speeds: dict[str, list[float]] = {"with drafts": [], "without": []}
    for _ in range(rounds):
        for name, medusa in zip(speeds, (drafted, plain), strict=True):
            masks[0], tokens, seconds, steps, prefill = 0.0, 0, 0.0, 0, 0.0
            for ask, schema in QUESTIONS:
                stats = medusa.generate(
                    ask, json_schema=schema, max_new_tokens=MAX_NEW_TOKENS
                ).stats
                tokens, steps = tokens + stats.tokens, steps + stats.steps
                seconds, prefill = seconds + stats.seconds, prefill + stats.prefill_s
            speeds[name].append(tokens / (seconds - prefill))
            print(
                f"{name}: {tokens} tokens in {steps} steps of {1e3 * (seconds - prefill) / steps:.1f} ms, "
                f"{speeds[name][-1]:.1f} tokens/s ({tokens / seconds:.1f} with prefill), "
                f"masks {100 * masks[0] / seconds:.2f} % of the time"
            )
    fast, slow = (statistics.median(values) for values in speeds.values())
    print(f"constrained decoding with drafts: {fast / slow:.2f} x without")


if __name__ == "__main__":
    main()
