"""Fuzzing of answers, a part of `make fuzz`: random requests are answered as plain decoding alone answers them.

Tiny models with each kind of layer and each number type of keys and values answer with drafts, in batches, from cached
prefixes, and from a prefix store after restarts, at times with damaged files. Prompts go on from earlier texts or part
from them. Tokens and log probabilities must be the same to the last bit. `tests/test_prefix_store.py` asks a few.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from medusa_cli.decode import Decoder, Request, Sampling, Step, prefix_cache, prefix_store
from medusa_cli.decode.policy import DraftPolicy, DynamicTreePolicy, StaticTreePolicy
from medusa_cli.decode.prefix_store import PrefixStore
from medusa_cli.decode.processors import LogitsOptions
from medusa_cli.decode.sequence import Sequence
from medusa_cli.drafters import Drafter
from medusa_cli.engine.kv_types import KV_TYPES
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import SPARSE, attach, tiny_tokenizer
from tests.models import Known, tiny_network
from tests.test_batches import policy as adaptive_policy
from tests.test_drafters import drafter_of

# Attention of two kinds, delta nets, short convolutions, experts, and attention sinks.
MODELS = ("llama", "qwen2", "gemma3_text", "qwen3_5_text", "lfm2", "qwen3_moe", "gpt_oss")
DRAFTERS = (None, "known", "known", "medusa", "hydra++-prompt", "amphista-prompt", "eagle-draft")
VOCAB, LONGEST = 128, 400
BLOCK = 64
# Requests of a model and a drafter; requests between two restarts.
PER_PLACE, PER_LIFE = 50, 10


@contextmanager
def small_blocks() -> Iterator[None]:
    """Lets prefixes of few tokens be stored and reused."""
    with ExitStack() as stack:
        for module in (prefix_cache, prefix_store):
            values = {"BLOCK": BLOCK, "MIN_TOKENS": 20, "MIN_GAIN": 2}
            stack.enter_context(patch.multiple(module, **values))
        yield


@dataclass
class Place:
    """Holds a tiny model, a drafter's kind, a folder of cached prefixes, and the texts so far.

    counts: answers by what happened to them.
    """

    backbone: Backbone
    kind: str | None
    folder: Path
    chance: random.Random
    title: str
    texts: list[list[int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, chance: random.Random, folder: Path) -> "Place":
        model, kind = chance.choice(MODELS), chance.choice(DRAFTERS)
        kv, quantize = chance.choice(list(KV_TYPES)), chance.choice((None, "int8"))
        backbone = Backbone(tiny_network(model), tiny_tokenizer(VOCAB))
        attach(backbone, "native", quantize=quantize, kv=kv)
        title = f"{model}, {kv}, {quantize or 'fp32'}, drafter {kind}"
        return cls(backbone, kind, folder, chance, title)

    def prompt(self) -> list[int]:
        """Returns an earlier text up to a random place, or none, with new tokens, some of which repeat."""
        chance = self.chance
        text = list(chance.choice(self.texts)) if self.texts and chance.random() < 0.8 else []
        if chance.random() < 0.6:
            text = text[: chance.randrange(len(text) + 1)]
        new = [chance.randrange(5, VOCAB) for _ in range(chance.choice((1, 3, 20, 70)))]
        return [*text[: LONGEST - 100], *new * chance.choice((1, 1, 3))][:LONGEST]

    def request(self) -> Request:
        chance = self.chance
        sampling = Sampling()
        if chance.random() < 0.3:
            cuts = chance.choice(({}, {"top_p": 0.9}, {"top_k": 20}))
            sampling = Sampling("exact", 0.8, seed=chance.randrange(1000), **cuts)
        penalty = chance.choice((None, None, None, 1.2))
        return Request(
            self.prompt(),
            chance.choice((1, 8, 16, 30)),
            sampling,
            stop_ids=() if chance.random() < 0.7 else None,
            top=chance.choice((None, 0, 3)),
            reuse=chance.choice((None, None, None, 0, 50)),
            logits_options=LogitsOptions(repetition_penalty=penalty),
            prompt_logprobs=chance.random() < 0.1,
            speculative=chance.random() < 0.9,
        )

    def policy(self) -> DraftPolicy:
        ngrams = self.chance.random() < 0.5
        if self.kind is None:
            return StaticTreePolicy(Tree.root_only(), ngrams=ngrams)
        policies: list[DraftPolicy] = [
            StaticTreePolicy(SPARSE.truncate(3), ngrams=ngrams),
            adaptive_policy(),
        ]
        if self.kind != "known":
            policies.append(DynamicTreePolicy(DynamicTree(9, 3), ngrams))
        return self.chance.choice(policies)

    def drafter(self, answers: list[list[int]]) -> Drafter | None:
        """Returns random heads, or a stub that knows the answers."""
        if self.kind == "known":
            return Known(answers, 0.7)
        return None if self.kind is None else drafter_of(self.backbone, self.kind)

    def store(self) -> PrefixStore | None:
        """Opens the folder of cached prefixes, in which a file may have been damaged."""
        files = sorted(self.folder.iterdir())
        if files and self.chance.random() < 0.3:
            file = self.chance.choice(files)
            data = bytearray(file.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            file.write_bytes(data)
            self.counts["damaged files"] += 1
        if self.chance.random() < 0.1:
            return None
        limit = self.chance.choice((10**9, 10**9, 300_000))
        return PrefixStore(self.folder, limit, self.backbone)

    def live(self) -> Iterator[str]:
        """Answers some requests with one decoder; yields a fault for each answer that differs from plain decoding's."""
        requests = [self.request() for _ in range(PER_LIFE)]
        expected = [alone(self.backbone, request, n) for n, request in enumerate(requests)]
        whole = [[*r.prompt, *tokens] for r, (tokens, _) in zip(requests, expected, strict=True)]
        store = self.store()
        decoder = Decoder(
            self.backbone,
            self.drafter(whole),
            self.policy(),
            slots=self.chance.choice((1, 2, 3)),
            store=store,
        )
        for number, sequence, steps in answered(decoder, requests, self.chance):
            tokens, likelihoods = result(steps)
            known, known_likelihoods = expected[number]
            cancelled = sequence.finish_reason == "cancelled"
            self.counts["answers"] += 1
            self.counts["cancelled"] += cancelled
            self.counts["tokens"] += len(tokens)
            self.counts["tokens from drafts"] += sum(step.accepted for step in steps)
            self.counts["tokens from the cache"] += sequence.reused
            self.counts["tokens from files"] += sequence.restored
            if cancelled:
                known = known[: len(tokens)]
                known_likelihoods = known_likelihoods[: len(likelihoods)]
            if tokens != known or likelihoods != known_likelihoods:
                policy = decoder.policy.description
                yield f"{self.title}, {policy}: {requests[number]}\n{tokens}\n{known}"
        self.texts = whole
        if store is not None:
            # A killed server has not written what is in memory.
            if self.chance.random() < 0.7:
                decoder.prefixes.save()
            store.close()


def result(steps: list[Step]) -> tuple[list[int], list[str]]:
    """Returns an answer's tokens, and its log probabilities with all of their digits."""
    likelihoods = [repr(own) for step in steps for own in step.likelihoods]
    return [token for step in steps for token in step.tokens], likelihoods


def alone(backbone: Backbone, request: Request, number: int) -> tuple[list[int], list[str]]:
    """Returns the result of plain decoding of one request with nothing else in the cache."""
    decoder = Decoder(backbone)
    sequence, first = decoder.admit(request, number)
    steps = [first]
    while not sequence.done:
        steps += [step for _, step in decoder.step()]
    return result(steps)


def answered(
    decoder: Decoder, requests: list[Request], chance: random.Random
) -> Iterator[tuple[int, Sequence, list[Step]]]:
    """Yields each request's number, sequence and steps, of requests that begin, go on and are cancelled at random."""
    waiting = list(range(len(requests)))
    prompts: dict[int, Any] = {}
    answers: dict[int, tuple[Sequence, list[Step]]] = {}
    while waiting or prompts or answers:
        for number, (sequence, steps) in list(answers.items()):
            if chance.random() < 0.01:
                sequence.cancel()
            if sequence.done:
                del answers[number]
                yield number, sequence, steps
        if waiting and decoder.free_slots and chance.random() < 0.5:
            number = waiting.pop(0)
            # Pieces of prompts then are as small as they can be.
            piece_s = chance.choice((None, 1e-9))
            prompts[number] = decoder.prefill(requests[number], number, piece_s)
            next(prompts[number])
        elif prompts and chance.random() < 0.7:
            number = chance.choice(list(prompts))
            sequence, step = next(prompts[number])
            if step is not None:
                answers[number] = sequence, [step]
                del prompts[number]
            elif chance.random() < 0.02:
                prompts.pop(number).close()
        else:
            for sequence, step in decoder.step():
                answers[sequence.number][1].append(step)
            if chance.random() < 0.3:
                decoder.prefixes.store_next()


def fuzz(number: int, answers: int) -> tuple[Counter[str], list[str]]:
    """Asks for at least so many answers; returns counts of what happened, and the faults."""
    torch.set_num_threads(1)
    chance = random.Random(number)
    counts = Counter[str]()
    faults = list[str]()
    with small_blocks():
        while counts["answers"] < answers and len(faults) < 10:
            with tempfile.TemporaryDirectory() as folder:
                place = Place.of(chance, Path(folder))
                while place.counts["answers"] < min(PER_PLACE, answers):
                    faults += place.live()
            counts += place.counts
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    seeds = [given.seed * 1000 + rank for rank in range(given.processes)]
    shares = [-(-given.answers // given.processes)] * given.processes
    with ProcessPoolExecutor(given.processes) as pool:
        results = list(pool.map(fuzz, seeds, shares))
    counts = sum((counts for counts, _ in results), Counter[str]())
    faults = [fault for _, faults in results for fault in faults]
    print("\n\n".join(faults), file=sys.stderr)
    print(f"{dict(counts)}, {len(faults)} differ; --seed {given.seed}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
