"""The scheduler of requests: one thread owns the decoder, and requests join and leave between the decoder's steps."""

import gc
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field

from medusa_cli.api import Medusa
from medusa_cli.decode import Answer, Decoder, Likelihood, Piece, Request, Step
from medusa_cli.decode.sequence import Sequence
from medusa_cli.errors import UserError, is_out_of_memory
from medusa_cli.loading import LoadedModel
from medusa_cli.serve.metrics import Metrics, add_positions
from medusa_cli.serve.record import Recorder
from medusa_cli.serve.refusals import Refusal

# Seconds that a piece of a prompt should take; running answers wait for each piece.
PIECE_S = 0.12
# Of this many pieces, one is run for the oldest prompt, the others for the prompt with the fewest tokens left.
PIECES = 4
# Seconds after which a client may retry a refused request.
RETRY_S = 2
RESTART_S = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Holds how many tokens a prompt has, were cached, and are processed, and the milliseconds since its start."""

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(frozen=True)
class Event:
    """Holds the text and tokens that a step added to an answer; the last event may carry an error instead.

    progress: set in events that are sent while the prompt is run; such an event has no step.
    """

    pieces: list[Piece] = field(default_factory=list)
    likelihoods: tuple[Likelihood, ...] = ()
    error: Exception | None = None
    last: bool = False
    tokens: list[int] = field(default_factory=list)
    progress: Progress | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


# The event that a stream gets while the answer has nothing new.
WAITING = Event()


@dataclass(eq=False)
class Ticket:
    """Holds a request in the queue or in a slot, its answer so far, and the callback that receives its events.

    sequence: the sequence that answers the request, if it was made beforehand. reused: the number of prompt tokens from
    the prefix cache. drafts: the number of steps with draft tokens. accepted_at: for each position, the number of steps
    that accepted a draft token there. abandoned: nobody waits for the answer, so the scheduler frees the slot before
    the next step. reports: tell the client the progress after each piece of the prompt. kind: the kind of the request,
    for metrics. tokens: the answer's tokens. keep: records these tokens when the answer is complete.
    """

    request: Request
    answer: Answer
    deliver: Callable[[Event], None]
    sequence: Sequence | None = None
    submitted: float = field(default_factory=time.perf_counter)
    reused: int = 0
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    abandoned: bool = False
    reports: bool = False
    kind: str = "completion"
    tokens: list[int] = field(default_factory=list)
    keep: Callable[[list[int]], None] | None = None

    @property
    def seconds(self) -> float:
        """Returns the seconds since the request was submitted."""
        return time.perf_counter() - self.submitted

    def count(self, step: Step) -> None:
        """Adds a step to `drafts`, if it has draft tokens, and to `accepted_at`."""
        self.drafts += step.nodes > 1
        add_positions(self.accepted_at, step)


@dataclass(eq=False)
class Prompt:
    """Holds a prompt that is being run: its ticket, its sequence, and the iterator over its pieces."""

    ticket: Ticket
    sequence: Sequence
    pieces: Generator[tuple[Sequence, Step | None]]
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> int:
        """Returns the number of prompt tokens that are left to run, plus those that the drafter has yet to read."""
        unread = sum(len(new.tokens) for new in self.sequence.unread)
        return len(self.ticket.request.prompt) - len(self.sequence.tokens) + unread

    def report(self) -> None:
        """Tells the client the progress of the prompt, if the request asks for it."""
        if self.ticket.reports:
            total = len(self.ticket.request.prompt)
            cached = self.sequence.reused
            # The last piece also gives the first token of the answer.
            processed = min(len(self.sequence.tokens), total)
            time_ms = round(1000 * (time.perf_counter() - self.started))
            self.ticket.deliver(Event(progress=Progress(total, cached, processed, time_ms)))


class Scheduler:
    """Decodes requests in order of arrival, at most `slots` at a time, while up to `waiting` more are queued."""

    def __init__(self, medusa: Medusa, metrics: Metrics, *, slots: int, waiting: int) -> None:
        self._medusa = medusa
        self._metrics = metrics
        self._slots = slots
        self._max_waiting = waiting
        self._decoder = medusa.decoder(slots)
        self._running: dict[Sequence, Ticket] = {}
        self._prompts: list[Prompt] = []  # those being run, the oldest first
        self._pieces = 0  # the number of pieces run so far
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()  # guards the queue
        # Decoders with an earlier drafter, which stay until their answers end.
        self._retiring: list[Decoder] = []
        self._load: Callable[[], LoadedModel] | None = None
        self.recorder: Recorder | None = None
        self.closing = False
        self.alive = False
        metrics.running.set_function(lambda: len(self._running))
        metrics.waiting.set_function(lambda: len(self._waiting))

    @property
    def speculative(self) -> bool:
        """Returns True unless decoding is plain."""
        return self._medusa.loaded.policy is not None

    def running(self) -> list[Ticket]:
        """Returns the requests that are being decoded."""
        return list(self._running.values())

    def check_number(self, answers: int) -> None:
        """Raises Refusal for more answers to one client than the server can decode and queue."""
        capacity = self._max_waiting + self._slots
        if answers > capacity:
            text = (
                f"{answers} answers are more than the {capacity} that this server decodes or queues"
            )
            raise Refusal(400, f"n: {text}", param="n", code="invalid_value")

    def submit(self, tickets: Collection[Ticket]) -> None:
        """Queues all of a client's requests, or raises Refusal and queues none; `run` delivers their events."""
        self.check_number(len(tickets))
        with self._changed:
            if self.closing:
                raise Refusal(503, "the server is about to stop", code="closing", retry_s=RESTART_S)
            room = self._max_waiting + max(0, self._slots - len(self._running))
            if len(self._waiting) + len(tickets) > room:
                text = "too many requests; try again later"
                raise Refusal(429, text, code="queue_full", retry_s=RETRY_S)
            self._waiting.extend(tickets)
            self._changed.notify()

    def drain(self) -> None:
        """Stops accepting requests; `run` returns after the accepted requests are answered."""
        # Takes no lock, because the thread that a signal handler interrupts may hold the lock.
        self.closing = True

    def reload(self, load: Callable[[], LoadedModel]) -> None:
        """Lets `run` load another drafter between two steps; may be called in a signal handler."""
        self._load = load

    def run(self) -> None:
        """Decodes requests in this thread until `drain` was called and the accepted requests are answered.

        This should be the thread that loaded the model. OpenMP's workers belong to one thread, and a second thread's
        workers sleep between matmuls instead of spinning. Steps on a CPU then take 1.5 times as long.
        """
        self.alive = True
        try:
            while self._wait_for_work():
                try:
                    self._take_drafter()
                    self._evict()
                    self._admit()
                    self._prefill()
                    self._step()
                    self._decoder.prefixes.store_next()
                    self._metrics.cached_tokens.set(self._decoder.prefixes.tokens)
                # Clients must learn of the failure, and the next request must be served.
                except Exception as reason:
                    log.exception("a step failed; its requests fail")
                    self._fail_all(reason)
            self._decoder.prefixes.save()
        finally:
            self.alive = False

    def _wait_for_work(self) -> bool:
        """Waits for a request or a new drafter, and stores prefixes meanwhile; returns False once drained."""
        stored = False
        while True:
            with self._changed:
                if not stored and not self._has_work and not self.closing:
                    self._changed.wait(0.2)  # `drain` does not notify
                if self._has_work or self.closing:
                    return self._has_work
            stored = self._decoder.prefixes.store_next()

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._load is not None)

    def _take_drafter(self) -> None:
        """Loads the drafter that `reload` asks for; answers in progress continue with the earlier drafter.

        If loading fails, the earlier drafter stays.
        """
        load, self._load = self._load, None
        if load is None:
            return
        before = self._medusa.loaded
        try:
            self._medusa.use(load())
            decoder = self._medusa.decoder(self._slots)
        except Exception as reason:  # the clients must not notice
            self._medusa.use(before)
            log.error("the drafter was not loaded again, and the earlier one stays: %s", reason)
            return
        if self._running:
            self._retiring.append(self._decoder)
        self._decoder = decoder
        log.info(self._medusa.loaded.description)

    def _evict(self) -> None:
        """Ends abandoned requests, and frees their slots and their places in the queue."""
        for sequence, ticket in list(self._running.items()):
            if ticket.abandoned:
                self._release(sequence)
                self._finish(ticket, Event(last=True))
        with self._changed:
            abandoned = [ticket for ticket in self._waiting if ticket.abandoned]
            for ticket in abandoned:
                self._waiting.remove(ticket)
        for ticket in abandoned:
            self._finish(ticket, Event(last=True))

    def _next_has_room(self) -> bool:
        """Returns True if the first request in the queue finds a free slot and enough memory."""
        if not self._waiting or len(self._running) >= self._slots:
            return False
        return self._decoder.has_room(self._waiting[0].request)

    def _admit(self) -> None:
        """Gives free slots to waiting requests."""
        while self._next_has_room():
            with self._changed:
                ticket = self._waiting.popleft()
            self._metrics.queued.observe(ticket.seconds)
            pieces = self._decoder.prefill(ticket.sequence or ticket.request, piece_s=PIECE_S)
            try:
                sequence, _ = next(pieces)
            except Exception as reason:
                self._fail(ticket, reason)
                continue
            self._running[sequence] = ticket
            self._prompts.append(Prompt(ticket, sequence, pieces))
            self._prompts[-1].report()

    def _prefill(self) -> None:
        """Runs one piece of one prompt; each piece is followed by a step of the running requests.

        A short prompt does not wait for long prompts, and a long prompt advances even if many short prompts arrive.
        """
        if not self._prompts:
            return
        self._pieces += 1
        prompt = self._prompts[0]
        if self._pieces % PIECES:
            prompt = min(self._prompts, key=lambda other: other.left)
        try:
            _, first = next(prompt.pieces)
        except Exception as reason:
            self._release(prompt.sequence)
            self._fail(prompt.ticket, reason)
            return
        prompt.report()
        if first is not None:
            self._prompts.remove(prompt)
            ticket = prompt.ticket
            ticket.reused = prompt.sequence.reused
            self._metrics.first_token.observe(ticket.seconds)
            self._metrics.prompt_tokens.inc(len(ticket.request.prompt))
            self._metrics.reused_tokens.inc(ticket.reused)
            self._metrics.restored_tokens.inc(prompt.sequence.restored)
            self._deliver(prompt.sequence, first)

    def _step(self) -> None:
        """Runs one step of all running requests."""
        for decoder in (self._decoder, *self._retiring):
            self._step_of(decoder)
        if self._retiring:
            self._retiring = [old for old in self._retiring if old.free_slots < self._slots]

    def _step_of(self, decoder: Decoder) -> None:
        """Runs one step of a decoder; if memory runs out, fails the requests that the decoder gave up."""
        try:
            steps = decoder.step()
        except Exception as reason:
            ended = [sequence for sequence in self._running if sequence.done]
            if not ended or not is_out_of_memory(reason):
                raise
            for sequence in ended:
                ticket = self._running[sequence]
                self._release(sequence)
                self._fail(ticket, reason)
            return
        if not steps:
            return
        self._metrics.batch_size.observe(len(steps))
        for sequence, step in steps:
            self._deliver(sequence, step)

    def _deliver(self, sequence: Sequence, step: Step) -> None:
        """Sends a step's text to its client, and ends the request if the answer has a finish reason."""
        ticket = self._running[sequence]
        ticket.tokens += step.tokens
        pieces = ticket.answer.add(step, sequence.finish_reason)
        step = ticket.answer.step
        self._metrics.count(step, ticket.kind)
        ticket.count(step)
        if ticket.answer.finish_reason is None:
            ticket.deliver(Event(pieces, step.likelihoods, tokens=step.tokens))
        else:  # a stop string may end the text before the decoder sees an end
            self._release(sequence)
            if ticket.keep is not None:  # before the client has the whole answer
                ticket.keep(ticket.tokens)
            self._finish(ticket, Event(pieces, step.likelihoods, last=True, tokens=step.tokens))

    def _release(self, sequence: Sequence) -> None:
        """Frees a sequence's slot."""
        sequence.cancel()
        self._running.pop(sequence, None)
        for prompt in [prompt for prompt in self._prompts if prompt.sequence is sequence]:
            self._prompts.remove(prompt)
            prompt.pieces.close()

    def _fail(self, ticket: Ticket, reason: Exception) -> None:
        """Ends a request with an error."""
        if not isinstance(reason, UserError):
            log.error("a request failed", exc_info=reason)
        self._finish(ticket, Event(error=reason, last=True))

    def _finish(self, ticket: Ticket, event: Event) -> None:
        """Sends a request's last event."""
        ticket.answer.cancel()
        reason = "error" if event.error else str(ticket.answer.finish_reason)
        self._metrics.requests.labels(reason).inc()
        self._metrics.request.observe(ticket.seconds)
        ticket.deliver(event)

    def _fail_all(self, reason: Exception) -> None:
        """Fails all running requests; frees the decoder and creates a new one with an empty cache."""
        for sequence in list(self._running):
            self._finish(self._running.pop(sequence), Event(error=reason, last=True))
        self._prompts = []
        self._retiring = []
        traceback.clear_frames(reason.__traceback__)  # the frames hold the old decoder
        del self._decoder
        gc.collect()
        self._decoder = self._new_decoder()

    def _new_decoder(self) -> Decoder:
        """Returns a new decoder; fails waiting requests as long as there is no memory for a decoder."""
        while True:
            try:
                return self._medusa.decoder(self._slots)
            except Exception as reason:
                if self.closing or not is_out_of_memory(reason):
                    raise
                with self._changed:
                    waiting = list(self._waiting)
                    self._waiting.clear()
                for ticket in waiting:
                    self._fail(ticket, reason)
                time.sleep(RETRY_S)
