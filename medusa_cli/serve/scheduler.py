"""Requests to steps: one thread owns the decoder, lets requests join and leave between steps, hands out pieces."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from medusa_cli.api import Medusa
from medusa_cli.decode import Likelihood, Piece, Reply, Request, Step
from medusa_cli.decode.sequence import Sequence
from medusa_cli.errors import UserError
from medusa_cli.serve.metrics import Metrics

log = logging.getLogger(__name__)


class Full(Exception):
    """The queue takes no more requests for now."""


class Closing(Exception):
    """The server is about to stop and takes no more requests."""


@dataclass(frozen=True)
class Event:
    """What a step added to an answer; the last one carries why it ended, or what went wrong."""

    pieces: list[Piece] = field(default_factory=list)
    likelihoods: tuple[Likelihood, ...] = ()
    error: Exception | None = None
    last: bool = False


class Ticket:
    """One request on its way: its reply so far, and whom to tell of each step."""

    def __init__(self, request: Request, reply: Reply, deliver: Callable[[Event], None]) -> None:
        self.request, self.reply, self.deliver = request, reply, deliver
        self.came = time.perf_counter()
        self.reused = 0
        self.left = False

    def leave(self) -> None:
        """Nobody waits for the answer any more: its slot is free at the next step."""
        self.left = True


class Scheduler:
    """First come, first served: at most `slots` requests decode side by side and `waiting` more wait."""

    def __init__(self, medusa: Medusa, metrics: Metrics, *, slots: int, waiting: int) -> None:
        self._medusa, self._metrics = medusa, metrics
        self._slots, self._most = slots, waiting
        self._decoder = medusa.decoder(slots)
        self._running: dict[Sequence, Ticket] = {}
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._alive = False
        self._step_s = 0.0
        metrics.watch(lambda: len(self._running), lambda: len(self._waiting))

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Ticket:
        """Queue a request; `deliver` is called from the decoding thread. Raises Full or Closing."""
        ticket = Ticket(request, Reply(self._medusa.backbone, request.stop_strings), deliver)
        with self._changed:
            if self._closing:
                raise Closing
            if len(self._waiting) >= self._most + max(0, self._slots - len(self._running)):
                raise Full
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def drain(self) -> None:
        """Take no more requests; `run` returns when those under way are answered."""
        self._closing = True  # no lock, which the thread that a signal handler interrupts may hold

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether requests are being answered."""
        return self._alive

    @property
    def wait_s(self) -> int:
        """Seconds after which it is worth asking again: what one of those that run may still take."""
        left = [t.request.max_new_tokens - len(t.reply.tokens) for t in list(self._running.values())]
        return max(1, min(60, round(min(left, default=0) * self._step_s)))

    def run(self) -> None:
        """Decode in this thread until drained.

        Best the one that loaded the model: OpenMP's workers belong to a thread, and a second team makes them more than
        the cores, at which they sleep between products instead of spinning: steps on a CPU are half as slow again.
        """
        self._alive = True
        try:
            self._loop()
        finally:
            self._alive = False

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._running:
                    if self._closing:
                        return
                    self._changed.wait(0.2)  # `drain` does not notify
            try:
                self._let_go()
                self._let_in()
                self._step()
            except Exception as reason:  # whatever it is, those who wait must hear of it, and the next be served
                log.exception("a step failed; the requests in it are given up")
                self._give_up(reason)

    def _let_go(self) -> None:
        """Free the slots, and the places in the queue, of those whose clients are gone."""
        for sequence, ticket in list(self._running.items()):
            if ticket.left:
                self._decoder.cancel(sequence)
                self._end(ticket, sequence)
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.left]
            for ticket in gone:
                self._waiting.remove(ticket)
        for ticket in gone:
            self._end(ticket)

    def _let_in(self) -> None:
        """Admit as many as there is room for."""
        while self._waiting and self._decoder.free_slots:
            with self._changed:
                ticket = self._waiting.popleft()
            self._metrics.queued(time.perf_counter() - ticket.came)
            try:
                sequence, first = self._decoder.admit(ticket.request)
            except UserError as reason:
                self._end(ticket, error=reason)
                continue
            except Exception as reason:
                self._end(ticket, error=reason)
                raise
            ticket.reused = sequence.reused
            self._running[sequence] = ticket
            self._metrics.first(time.perf_counter() - ticket.came, len(ticket.request.prompt), sequence.reused)
            self._tell(sequence, ticket, first)

    def _step(self) -> None:
        """One step of all that run."""
        began = time.perf_counter()
        steps = self._decoder.step()
        if not steps:
            return
        seconds = time.perf_counter() - began
        tokens = sum(len(step.tokens) for _, step in steps) / len(steps)
        self._step_s += 0.1 * (seconds / tokens - self._step_s)
        self._metrics.step(len(steps))
        for sequence, step in steps:
            self._tell(sequence, self._running[sequence], step)

    def _tell(self, sequence: Sequence, ticket: Ticket, step: Step) -> None:
        pieces = ticket.reply.add(step, sequence.finish_reason)
        self._metrics.tokens(step)
        over = ticket.reply.reason is not None
        if over:
            self._decoder.cancel(sequence)  # a stop string may end the text before the decoder sees an end
            self._end(ticket, sequence, pieces=pieces, likelihoods=step.likelihoods)
        else:
            ticket.deliver(Event(pieces, step.likelihoods))

    def _end(
        self,
        ticket: Ticket,
        sequence: Sequence | None = None,
        *,
        pieces: list[Piece] | None = None,
        likelihoods: tuple[Likelihood, ...] = (),
        error: Exception | None = None,
    ) -> None:
        if sequence is not None:
            del self._running[sequence]
        ticket.reply.cancel()
        self._metrics.ended("error" if error else str(ticket.reply.reason), time.perf_counter() - ticket.came)
        ticket.deliver(Event(pieces or [], likelihoods, error, last=True))

    def _give_up(self, reason: Exception) -> None:
        """Tell all that run, and begin with an empty cache."""
        for sequence, ticket in list(self._running.items()):
            self._end(ticket, sequence, error=reason)
        self._decoder = self._medusa.decoder(self._slots)
