"""Training-time test: a drafter's layer run several steps on its own states, as drafting will run it (EAGLE-3, 3.2)."""

import torch
from torch import Tensor

from medusa_cli.drafters.blocks import by_sequence
from medusa_cli.drafters.midlayer import Midlayer


class Unrolled:
    """The states of steps 1, 2, .. at the n positions that are learnt, each step made when it is first asked for.

    Step 1 reads the true states at positions 0 .. p of a conversation. Step k stands for the k-th level of a draft made
    after position p: it is at place p + k - 1, reads the state of the step before and the true token there, and sees
    the true rows 0 .. p, its own rows of steps 2 .. k, and no row of another position's draft.
    """

    def __init__(self, layer: Midlayer, states: Tensor, embedded: Tensor, views: Tensor, learnt: Tensor) -> None:
        """states and embedded [P, H]; views [P]: the conversation of each position; learnt [n]: positions."""
        x, places = by_sequence(states, views)
        embeddings, _ = by_sequence(embedded, views)
        owner, position = places[learnt] // x.shape[1], places[learnt] % x.shape[1]
        present = owner.unique_consecutive()
        self._layer, self._embedded = layer, embeddings[present]  # [S, L, H]
        where, self._slots = by_sequence(position[:, None], owner)
        self._where = where[..., 0]  # [S, W]: the learnt positions side by side
        x, columns = x[present], torch.arange(x.shape[1], device=x.device)
        self._keys, self._values = layer.keys_values(layer.beside(x, self._embedded), columns)  # [S, heads, L, D]
        self._hidden = columns > self._where[:, None, :, None]  # [S, 1, W, L]: what lies ahead
        self._own: list[tuple[Tensor, Tensor]] = []  # keys and values [S, heads, W, D] of steps 2, 3, ..
        self._states = x.gather(1, self._where[..., None].expand(-1, -1, x.shape[-1]))  # what the next step reads
        self._steps: list[Tensor] = []

    def step(self, number: int) -> Tensor:
        """The states [n, H] of a step (from 0)."""
        while len(self._steps) <= number:
            self._advance()
        return self._steps[number].flatten(0, 1)[self._slots]

    def _advance(self) -> None:
        # Beyond a conversation's end there is no target: what is read there does not matter.
        place = self._where + len(self._steps)
        token = place.clamp(max=self._embedded.shape[1] - 1)[..., None].expand(-1, -1, self._embedded.shape[-1])
        x = self._layer.beside(self._states, self._embedded.gather(1, token))
        if self._steps:
            self._own.append(self._layer.keys_values(x, place))
        seen = self._attend(self._layer.queries(x, place))
        self._states = self._layer.leave(self._states, seen)
        self._steps.append(self._states)

    def _attend(self, q: Tensor) -> Tensor:
        """What queries [S, heads, W, D] see of the true rows and of their own steps, each of these one row."""
        q = q * q.shape[-1] ** -0.5
        far = (q @ self._keys.transpose(-1, -2)).float().masked_fill(self._hidden, -torch.inf)
        near = [(q * keys).sum(-1, keepdim=True).float() for keys, _ in self._own]
        shares = torch.cat([far, *near], dim=-1).softmax(-1).to(q.dtype)
        seen = shares[..., : far.shape[-1]] @ self._values
        for step, (_, values) in enumerate(self._own):
            seen = seen + shares[..., far.shape[-1] + step, None] * values
        return seen
