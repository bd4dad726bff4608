"""When an answer ends: stop tokens, stop strings, the token limit, and the context, near which trees are cut."""

from collections.abc import Iterable, Sequence

from medusa_cli.backbone import Backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import Growth, Tree


class Ending:
    """Cuts the tokens of each step at the first reason to stop: "stop" or "length"."""

    def __init__(
        self,
        backbone: Backbone,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Iterable[int] | None,
        stop_strings: Sequence[str],
    ) -> None:
        if max_new_tokens < 1:
            raise UsageError(f"@max_new_tokens {max_new_tokens} is too small", "use 1 or more")
        if not prompt:
            raise UserError("the prompt is empty", "give at least one token")
        if len(prompt) >= backbone.max_positions:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens, {backbone.id!r} has a context of {backbone.max_positions:,}",
                "shorten the prompt or clear the history",
            )
        self._stop_ids = backbone.eos_ids if stop_ids is None else frozenset(stop_ids)
        self._strings = [text for text in stop_strings if text]
        self._tokenizer = backbone.tokenizer
        self._emitted: list[int] = []
        self._left = min(max_new_tokens, backbone.max_positions - len(prompt))
        self.reason: str | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens that still belong to the answer; a stop token and the token completing a stop string included."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self._emitted.append(token)
            self._left -= 1
            if token in self._stop_ids or self._met_string():
                self.reason = "stop"
            elif self._left <= 0:
                self.reason = "length"
            if self.done:
                break
        return kept

    def _met_string(self) -> bool:
        if not self._strings:
            return False
        # A string of n bytes ends within its last n tokens or so; special tokens add none, hence the margin.
        tail = self._emitted[-(max(len(text.encode()) for text in self._strings) + 8) :]
        # Special tokens are no part of what is shown, but a stop string may be one of them, or end in one.
        tails = [self._tokenizer.decode(tail, skip_special_tokens=skip) for skip in (True, False)]
        return any(text in one for text in self._strings for one in tails)


def fitting(tree: Tree | Growth, positions: int) -> Tree | Growth:
    """The tree (or growth), or its part that needs no more than this many positions."""
    return tree if tree.max_depth < positions else tree.cut(max(positions - 1, 0))
