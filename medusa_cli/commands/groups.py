"""Options that go together: a command takes them as one dataclass, the command line offers its fields."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, get_args, get_origin, get_type_hints

from medusa_cli import console, options

if TYPE_CHECKING:
    from medusa_cli.backbone.network import NetworkOptions
    from medusa_cli.decoding import Sampling
    from medusa_cli.engines.load import BackboneOptions
    from medusa_cli.runs.resolve import Choice


@dataclass(frozen=True)
class Where:
    """Where a backbone runs, in which numbers, and how it is loaded."""

    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    engine: options.Engine = "auto"
    load_in_4bit: options.LoadIn4bit = None
    load_in_8bit: options.LoadIn8bit = None
    trust_remote_code: options.TrustRemoteCode = False

    def of(self, model: str) -> str:
        """A model's name for a greeting line, which says where its own code is let run."""
        return f"{model}, its own code trusted (--trust-remote-code)" if self.trust_remote_code else model

    @property
    def loading(self) -> "BackboneOptions":
        """What `load_backbone` is given."""
        return {**self.network, "engine": self.engine}

    @property
    def network(self) -> "NetworkOptions":
        """What `load_network` is given; weights that nobody asked to be rounded are whole."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "load_in_4bit": bool(self.load_in_4bit),
            "load_in_8bit": bool(self.load_in_8bit),
        }

    @property
    def rounding(self) -> str | None:
        """How the model's weights are rounded, where that was asked for: "4bit", "8bit", "int8" or "int4"."""
        from medusa_cli.engines.kernels import BITS

        ways = {"4bit": self.load_in_4bit, "8bit": self.load_in_8bit, self.engine: self.engine in BITS}
        return next((way for way, asked in ways.items() if asked), None)


@dataclass(frozen=True)
class Drafting:
    """Which model decodes, what drafts for it, and over which trees."""

    run: options.RunOrShipped = None
    model: options.Model = None
    drafter: options.Drafter = None
    tree: options.Tree = None
    lookup: options.Lookup = None

    def or_plain(self, baseline: bool) -> "Choice":
        """The files, or those of plain decoding with --baseline; UsageError where both that and lookups are asked."""
        from medusa_cli.errors import UsageError

        if baseline and self.lookup:
            raise UsageError("--baseline and --lookup exclude each other", "leave one of them out")
        return self.choose(need_drafter=not baseline)

    def choose(self, need_drafter: bool = True) -> "Choice":
        """The files that belong together; UserError where nothing is to be had."""
        from medusa_cli.runs.resolve import choose

        return choose(self.model, self.run, self.drafter, self.tree, need_drafter=need_drafter, lookup=self.lookup)


@dataclass(frozen=True)
class Rules:
    """How tokens are chosen, and how many at most."""

    max_new_tokens: options.MaxNewTokens = None
    sampling: options.SamplingMode = None
    temperature: options.Temperature = None
    top_p: options.TopP = 1.0
    top_k: options.TopK = 0
    random_seed: options.RandomSeed = None

    @property
    def sampled(self) -> "Sampling":
        """The rule by which tokens are chosen; UsageError where there is none such."""
        from medusa_cli.decoding.sampling import sampling_of

        return sampling_of(self.sampling, self.temperature, self.top_p, self.top_k, self.random_seed)


@dataclass(frozen=True)
class Said:
    """What a command says, and how."""

    json: options.Json = False
    quiet: options.Quiet = False
    debug: options.Debug = False

    def configure(self, first: bool = True) -> None:
        """Let the console speak so; of several processes, the first one alone."""
        console.configure(quiet=self.quiet or not first, json=self.json or not first)


def but(*names: str) -> frozenset[str]:
    """Fields of such a dataclass that a command does not offer: Annotated[Where, but("engine")]."""
    return frozenset(names)


def spread_out(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: each parameter that is a dataclass gives way to the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        kind, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        left_out = frozenset[str]().union(*(one for one in more if isinstance(one, frozenset)))
        offered = [one for one in fields(kind) if one.name not in left_out]
        groups[name], types = (kind, [one.name for one in offered]), get_type_hints(kind, include_extras=True)
        parameters += [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
            for one in offered
        ]

    def run(**given: object) -> None:
        made = {name: kind(**{one: given.pop(one) for one in names}) for name, (kind, names) in groups.items()}
        command(**given, **made)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run
