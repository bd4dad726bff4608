"""What is asked of a decoder: token ids to continue, and by which rules."""

from dataclasses import dataclass

from medusa_cli.decoding.decoder import Decoder
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.sequence import Sequence
from medusa_cli.decoding.types import Step


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how its answer is made; the rules are those of Decoder.admit."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] | None = None
    stop_strings: tuple[str, ...] = ()
    top: int | None = None

    def admit(self, decoder: Decoder, number: int = 0) -> tuple[Sequence, Step]:
        """Take the prompt in; `number` sets its draws apart. Errors as Decoder.admit's."""
        return decoder.admit(
            self.prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            number=number,
            stop_ids=self.stop_ids,
            stop_strings=self.stop_strings,
            top=self.top,
        )
