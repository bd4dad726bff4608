"""Training-time test: a drafter's layer run several steps on its own states, as drafting will run it (EAGLE-3, 3.2)."""

import torch
from torch import Tensor

from medusa_cli.drafters.blocks import by_sequence, places_by_sequence
from medusa_cli.drafters.merged import Shared, merged_attention
from medusa_cli.drafters.midlayer import Midlayer


class Unrolled:
    """The states of steps 1, 2, .. at the n positions that are learnt, each step made when it is first asked for.

    Step 1 reads the true states at positions 0 .. p of a conversation. Step k stands for the k-th level of a draft made
    after position p: it is at place p + k - 1, reads the state of the step before and the true token there, and sees
    the true rows 0 .. p, its own rows of steps 2 .. k, and no row of another position's draft.
    """

    def __init__(self, layer: Midlayer, states: Tensor, embedded: Tensor, views: Tensor, learnt: Tensor) -> None:
        """states and embedded [P, H]; views [P]: the conversation of each position; learnt [n]: positions."""
        self._layer, self._embedded, self._learnt = layer, embedded, learnt
        places, count, longest = places_by_sequence(views)
        place = places % longest
        self._place = place[learnt]
        keys, values = layer.keys_values(layer.beside(states, embedded), place)  # [heads, P, D]
        owner = places[learnt] // longest
        where, slots = by_sequence(self._place[:, None], owner)  # [S, W, 1]: the learnt positions side by side
        present = owner.unique_consecutive()
        spread = keys.new_zeros(count * longest, 2, *keys[:, 0].shape)
        spread = spread.index_copy(0, places, torch.stack([keys, values]).permute(2, 0, 1, 3))
        keys, values = spread.view(count, longest, 2, *keys[:, 0].shape)[present].permute(2, 0, 3, 1, 4)
        ahead = torch.arange(longest, device=where.device) > where  # [S, W, L]
        mask = keys.new_zeros(1, 1, 1, 1).masked_fill(ahead[:, None], -torch.inf)
        self._shared = Shared(keys, values, mask, slots)
        self._own: list[tuple[Tensor, Tensor]] = []  # keys and values [heads, n, D] of steps 2, 3, ..
        self._states = states[learnt]  # [n, H]: what the next step reads
        self._steps: list[Tensor] = []

    def step(self, number: int) -> Tensor:
        """The states [n, H] of a step (from 0)."""
        while len(self._steps) <= number:
            self._advance()
        return self._steps[number]

    def _advance(self) -> None:
        ahead = len(self._steps)
        # Beyond a conversation's end there is no target: what is read there does not matter.
        token = (self._learnt + ahead).clamp(max=len(self._embedded) - 1)
        x, place = self._layer.beside(self._states, self._embedded[token]), self._place + ahead
        if ahead:
            self._own.append(self._layer.keys_values(x, place))
        seen = merged_attention(self._layer.queries(x, place), self._shared, self._own)
        self._states = self._layer.leave(self._states, seen)
        self._steps.append(self._states)
