"""Prometheus counters, gauges and histograms of one server."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from medusa_cli.decode import Step

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)


def add_positions(accepted_at: list[int], step: Step) -> None:
    """Adds a step to the counts of accepted draft tokens by position; position 0 is the first after the root."""
    accepted = step.accepted if step.path else 0
    accepted_at += [0] * (accepted - len(accepted_at))
    for position in range(accepted):
        accepted_at[position] += 1


class SpeculativeCounters(Collector):
    """Counts drafts as vLLM does and under vLLM's names, because vLLM's benchmarks and other tools read these names.

    All nodes of a draft tree except the root count as draft tokens. The counts are not Counters, because a Counter
    also exports its creation time. vLLM's benchmarks add up all lines of a name, and this time would enter the sum.
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._drafts = self._draft_tokens = self._accepted = 0
        self._accepted_at = list[int]()

    def count(self, step: Step) -> None:
        if step.path and step.nodes > 1:
            self._drafts += 1
            self._draft_tokens += step.nodes - 1
            self._accepted += step.accepted
            add_positions(self._accepted_at, step)

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value, about in (
            ("drafts", self._drafts, "Steps with draft tokens"),
            ("draft_tokens", self._draft_tokens, "Draft tokens"),
            ("accepted_tokens", self._accepted, "Accepted draft tokens"),
        ):
            family = CounterMetricFamily(
                f"vllm:spec_decode_num_{name}", about, labels=[*self._labels]
            )
            family.add_metric([*self._labels.values()], value)
            yield family
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        about = "Accepted draft tokens by position"
        family = CounterMetricFamily(name, about, labels=[*self._labels, "position"])
        for position, value in enumerate(list(self._accepted_at)):
            family.add_metric([*self._labels.values(), str(position)], value)
        yield family


class Metrics:
    """Holds one server's metrics in a separate registry. The code that measures a value updates its metric here."""

    def __init__(self, model: str = "") -> None:
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry}
        self._speculative = SpeculativeCounters(model)
        self._registry.register(self._speculative)
        self.responses = Counter(
            "medusa_http_responses", "Responses by path and status", ["path", "code"], **own
        )
        self.requests = Counter(
            "medusa_requests", "Requests that ended, by finish reason", ["reason"], **own
        )
        self.prompt_tokens = Counter("medusa_prompt_tokens", "Tokens of prompts", **own)
        self.reused_tokens = Counter(
            "medusa_prompt_tokens_reused", "Prompt tokens from the prefix cache", **own
        )
        self.restored_tokens = Counter(
            "medusa_prompt_tokens_restored",
            "Prompt tokens from the prefix cache that came from the disk",
            **own,
        )
        self.cached_tokens = Gauge(
            "medusa_cached_tokens", "Tokens of running texts and of the prefix cache", **own
        )
        self._generated = Counter("medusa_generated_tokens", "Tokens of answers", **own)
        self._verified = Counter("medusa_verified_steps", "Verify steps of sequences", **own)
        self._kind_steps = Counter(
            "medusa_kind_steps", "Verify steps by kind of request", ["kind"], **own
        )
        self._kind_accepted = Counter(
            "medusa_kind_accepted_tokens",
            "Accepted draft tokens by kind of request",
            ["kind"],
            **own,
        )
        self.running = Gauge("medusa_requests_running", "Requests that decode", **own)
        self.waiting = Gauge("medusa_requests_waiting", "Requests in the queue", **own)
        self.batch_size = Histogram(
            "medusa_batch_size", "Sequences in a step", buckets=SEQUENCES, **own
        )
        self.queued = Histogram(
            "medusa_queue_seconds", "From a request to its prefill", buckets=SECONDS, **own
        )
        self.first_token = Histogram(
            "medusa_first_token_seconds", "Time to first token", buckets=SECONDS, **own
        )
        self.request = Histogram(
            "medusa_request_seconds", "From a request to its end", buckets=SECONDS, **own
        )

    def count(self, step: Step, kind: str = "completion") -> None:
        """Adds one step of one sequence to the counts; kind: the kind of the sequence's request."""
        self._generated.inc(len(step.tokens))
        self._speculative.count(step)
        if step.path:
            self._verified.inc()
            self._kind_steps.labels(kind).inc()
            self._kind_accepted.labels(kind).inc(step.accepted)

    def page(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
