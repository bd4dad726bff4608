"""A vocabulary: the bytes that each token stands for, the rules that decode texts, and the ids that end an answer."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

# A tokenizer's clean-up removes blanks in patterns such as " .", " ' " and " n't". UNCLEAN finds the end of a text
# that may be the beginning of such a pattern: when more text follows, the clean-up may still change it.
LONGEST_UNCLEAN = 64
UNCLEAN = re.compile(f" [ 'nvr]{{0,{LONGEST_UNCLEAN - 1}}}$")


def _byte_letters() -> dict[str, int]:
    """Returns the byte that each letter stands for in the tokens of byte-level tokenizers, as in GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_letters()


class Vocabulary:
    """Returns the bytes of a tokenizer's tokens, and cleans up texts by the tokenizer's rules.

    cleans_up: the tokenizer removes blanks before punctuation in the whole text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        # The bytes of tokens that each stand for one byte (byte fallback), such as `<0x0A>`.
        self._bytes: dict[int | None, int] = {}
        if "ByteFallback" in kinds:
            self._bytes = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(0x100)}
        # transformers cleans up texts under the same condition.
        for_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(getattr(backend, "model", None)).__name__ == "BPE"
        self.cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (
            not is_bpe or bool(getattr(tokenizer, for_bpe, False))
        )

    def bytes_of(self, token: int) -> bytes | None:
        """Returns a token's own bytes if the vocabulary states them; None if they are those of its text."""
        if (byte := self.byte_of(token)) is not None:
            return bytes([byte])
        if not self._byte_level or token in self._added:
            return None
        letters = self._tokenizer.convert_ids_to_tokens(token) or ""
        if not all(letter in BYTES for letter in letters):
            return None
        return bytes(BYTES[letter] for letter in letters)

    def byte_of(self, token: int) -> int | None:
        """Returns the byte for which a token stands by byte fallback; None for other tokens."""
        return self._bytes.get(token)

    def clean_up(self, text: str) -> str:
        """Returns a text, cleaned up if the tokenizer cleans up texts."""
        return str(self._tokenizer.clean_up_tokenization(text)) if self.cleans_up else text

    def settled(self, text: str) -> int:
        """Returns how many characters at the beginning of a decoded text stay as they are, whatever tokens follow.

        The text must not have been cleaned up.
        """
        end = len(text)
        if self.cleans_up and (match := UNCLEAN.search(text, max(0, end - LONGEST_UNCLEAN))):
            end = match.start()
        return end

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Returns the types of a decoder and of the decoders that it consists of."""
    inner = [_kinds(part) for part in decoder.get("decoders", ())]
    return {decoder["type"]}.union(*inner)


def eos_ids_of(owners: Iterable[Any]) -> list[Any]:
    """Returns the end-of-answer token ids that configs and tokenizers give."""
    eos_ids: list[Any] = []
    for owner in owners:
        named = getattr(owner, "eos_token_id", None)
        if isinstance(named, list):
            eos_ids += named
        elif named is not None:
            eos_ids.append(named)
    return eos_ids
