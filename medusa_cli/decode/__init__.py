"""Decoding: requests become sequences that a decoder advances step by step."""

from medusa_cli.decode.accept import accept
from medusa_cli.decode.adaptive_policy import AdaptivePolicy
from medusa_cli.decode.answer import Accepted, Answer, Likelihood, Piece, Stats, Step
from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.policy import DraftPolicy, policy_of
from medusa_cli.decode.processors import LogitsOptions
from medusa_cli.decode.sampling_options import Sampling
from medusa_cli.decode.sequence import Request, Sequence

__all__ = [
    "Accepted",
    "AdaptivePolicy",
    "Answer",
    "Decoder",
    "DraftPolicy",
    "Likelihood",
    "LogitsOptions",
    "Piece",
    "Request",
    "Sampling",
    "Sequence",
    "Stats",
    "Step",
    "accept",
    "policy_of",
]
