"""How many of the drafts that are hoped for come true: learnt of each text, and over texts of each kind of sampling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from medusa_cli.decoding.sampling import Sampling

# Accepted drafts that what is known beforehand counts for, of a text and of a kind.
PRIOR = 2.0
# How much of what was seen of a text, and of a kind, before a step is left after it.
MEMORY, LONG_MEMORY = 0.98, 0.995
# A kind's luck is told where it is this far from what was told last.
MOVED = 0.1
# Above this temperature all is chance alike.
HOTTEST = 100.0


@dataclass
class Luck:
    """Of the drafts that were expected to be accepted beyond the first token so many `hoped`, so many `came`."""

    hoped: float
    came: float

    @property
    def share(self) -> float:
        return self.came / self.hoped

    def learn(self, hoped: float, came: float, memory: float) -> None:
        self.hoped, self.came = memory * self.hoped + hoped, memory * self.came + came

    def doubt(self) -> None:
        """Let what was learnt weigh no more than what is known beforehand."""
        less = min(1.0, PRIOR / self.hoped)
        self.hoped, self.came = less * self.hoped, less * self.came


@dataclass
class Fortune(Luck):
    """A text's luck, and that of all texts of its kind."""

    kind: str


@dataclass
class Fortunes:
    """The luck of every kind of sampling seen: `known` before, in this process or an earlier one, and learnt since.

    on_moved is told of the shares of all kinds where one has moved by the end of a text.
    """

    known: Mapping[str, float] = field(default_factory=dict)
    on_moved: Callable[[dict[str, float]], None] = lambda shares: None

    def __post_init__(self) -> None:
        self._kinds: dict[str, Luck] = {}
        self._told = dict(self.known)

    def begin(self, sampling: Sampling) -> Fortune:
        """The luck that a text begins with: that of its kind, which a few steps overrule."""
        kind, share = kind_of(sampling)
        if kind not in self._kinds:
            self._kinds[kind] = Luck(PRIOR, PRIOR * self.known.get(kind, share))
        return Fortune(PRIOR, PRIOR * self._kinds[kind].share, kind)

    def learn(self, text: Fortune, hoped: float, came: float) -> None:
        text.learn(hoped, came, MEMORY)
        self._kinds[text.kind].learn(hoped, came, LONG_MEMORY)

    def tell(self) -> None:
        """Tell of what was learnt, where it is worth it."""
        shares = {kind: luck.share for kind, luck in self._kinds.items()}
        if any(abs(share - self._told.get(kind, 1.0)) > MOVED for kind, share in shares.items()):
            self._told.update(shares)
            self.on_moved(dict(self._told))


def kind_of(sampling: Sampling) -> tuple[str, float]:
    """A kind of sampling by which drafts come true alike, and the share that does where nothing is known of it.

    What is expected of drafts was measured of likeliest tokens. The hotter, the less often they are drawn, unless cuts
    leave little else; that is a start, no more.
    """
    if sampling.greedy:
        return "greedy", 1.0
    temperature = min(sampling.temperature, HOTTEST)
    heat = round(4 * temperature) / 4
    if sampling.mode == "typical":
        return f"typical {heat:g}", 1.0
    cut = " cut" if sampling.top_p < 1 or sampling.top_k else ""
    return f"exact {heat:g}{cut}", 1 / (1 + temperature**3) if not cut else 1 / (1 + temperature)
