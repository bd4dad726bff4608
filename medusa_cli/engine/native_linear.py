"""Linear layers and embeddings over the library's packed matrices."""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.engine.native_model import NativeModel
from medusa_cli.native import PackedMatrix, library
from medusa_cli.native.library import Guesses, check
from medusa_cli.native.matrix import Floats, padded_floats


class NativeLinear(nn.Module):
    """A linear layer over a packed matrix, for inference only."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.out_features, self.in_features = matrix.shape
        self._gains: dict[nn.RMSNorm, tuple[Floats, int]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "NativeLinear":
        return self  # its weights do not change

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).float().contiguous()
        y = torch.from_numpy(self.matrix.multiply(rows.numpy()))
        return y.view(*x.shape[:-1], self.out_features)

    def guess(
        self,
        x: Tensor,
        width: int,
        temperature: float | None,
        norm: nn.RMSNorm | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids [n, width] of the best outputs for x [n, K], best first.

        With a temperature, the scores are log probabilities at this temperature. norm: is applied to x
        first; its weight must not change. tokens: the ids of the outputs, unless they are numbered from 0.
        """
        rows = x.float().contiguous()
        guesses, scores, ids = self.guesses(len(rows), width, temperature, norm, tokens)
        guesses.states = rows.data_ptr()
        guesses.rows, guesses.stride = rows.shape
        fits = norm is None or norm.weight.numel() == guesses.stride
        code = library().guess(byref(self.matrix.struct), byref(guesses)) if fits else -1
        check(code, f"{width} guesses for states {tuple(x.shape)} do not fit the matrix or norm")
        return scores, ids

    def guesses(
        self,
        rows: int,
        width: int,
        temperature: float | None,
        norm: nn.RMSNorm | None,
        tokens: Tensor | None,
    ) -> tuple[Any, Tensor, Tensor]:
        """Returns the library's structure for guesses of n rows, and the buffers of their scores and ids."""
        width = min(width, self.out_features)
        scores = torch.empty(rows, width)
        ids = torch.empty(rows, width, dtype=torch.long)
        gain = None
        if norm is not None:
            if norm not in self._gains:
                floats = padded_floats(norm.weight.detach().float().numpy())
                self._gains[norm] = floats, floats.ctypes.data
            _, gain = self._gains[norm]
        structure = Guesses(
            norm=gain,
            eps=0.0 if norm is None else norm.eps or 0.0,
            temperature=temperature or 0.0,
            width=width,
            ids=ids.data_ptr(),
            scores=scores.data_ptr(),
            tokens=None if tokens is None else tokens.data_ptr(),
        )
        return structure, scores, ids


class NativeEmbedding(nn.Module):
    """Embeds tokens with a packed matrix, for a network whose weights only the engine holds."""

    def __init__(self, model: NativeModel) -> None:
        super().__init__()
        self.matrix = model.embedding
        self.scale = model.description.embedding_scale
        self.hidden = model.description.sizes["hidden"]
        # Code that reads a vocabulary size, number type or device from the weight finds them here.
        self.weight = torch.empty(model.description.sizes["vocab"], 0)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = looked_up(self.matrix, tokens, self.scale, self.matrix.shape[1])
        return rows[..., : self.hidden]


def looked_up(matrix: PackedMatrix, tokens: Tensor, scale: float, stride: int) -> Tensor:
    """Returns a matrix's rows [B, n, stride] for tokens [B, n], times a scale.

    Raises IndexError if a token is beyond the vocabulary.
    """
    rows = matrix.embed(tokens.reshape(-1).numpy(), scale, stride)
    return torch.from_numpy(rows).view(*tokens.shape, stride)
