"""What the server counts, for Prometheus."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from medusa_cli.decode import Step

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One server's numbers, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made: Any = {"registry": self._registry}
        self._responses = Counter(
            "medusa_http_responses", "Responses sent, by path and status", ["path", "code"], **made
        )
        self._ended = Counter("medusa_requests", "Requests that ended, by reason", ["reason"], **made)
        self._prompt = Counter("medusa_prompt_tokens", "Tokens of prompts", **made)
        self._reused = Counter("medusa_prompt_tokens_reused", "Tokens of prompts that a slot held already", **made)
        self._tokens = Counter("medusa_generated_tokens", "Tokens of answers", **made)
        self._drafted = Counter("medusa_drafted_tokens", "Tokens drafted", **made)
        self._accepted = Counter("medusa_accepted_tokens", "Drafted tokens that were accepted", **made)
        self._verified = Counter("medusa_verified_steps", "Steps of sequences, prefill apart", **made)
        self._passes = Counter("medusa_passes", "Steps of the whole batch", **made)
        self._running = Gauge("medusa_requests_running", "Requests that decode", **made)
        self._waiting = Gauge("medusa_requests_waiting", "Requests in the queue", **made)
        self._batch = Histogram("medusa_batch_size", "Sequences in a step", buckets=(1, 2, 4, 8, 16, 32, 64), **made)
        self._queued = Histogram("medusa_queue_seconds", "From a request to its prefill", buckets=SECONDS, **made)
        self._first = Histogram(
            "medusa_first_token_seconds", "From a request to its first token", buckets=SECONDS, **made
        )
        self._whole = Histogram("medusa_request_seconds", "From a request to its end", buckets=SECONDS, **made)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read how many run and wait whenever somebody asks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def response(self, path: str, code: int) -> None:
        self._responses.labels(path, str(code)).inc()

    def queued(self, seconds: float) -> None:
        self._queued.observe(seconds)

    def first(self, seconds: float, prompt: int, reused: int) -> None:
        self._first.observe(seconds)
        self._prompt.inc(prompt)
        self._reused.inc(reused)

    def step(self, sequences: int) -> None:
        self._passes.inc()
        self._batch.observe(sequences)

    def tokens(self, step: Step) -> None:
        """Count what one sequence gained by a step."""
        self._tokens.inc(len(step.tokens))
        if not step.prefill:
            self._verified.inc()
            self._drafted.inc(step.drafted)
            self._accepted.inc(step.accepted)

    def ended(self, reason: str, seconds: float) -> None:
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)

    def page(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)
