"""A simulated device for tests: tensors that live on the CPU under another device's name, and a record of its work.

It raises where tensors of the two devices meet, as CUDA would, and counts kernels, copies and waits of the host.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Builds of torch without CUDA cannot name a tensor's device so, but every build has this one.
NAME = "meta"
aten: Any = torch.ops.aten
# These look composite to torch, but are one kernel (the last one a copy) on a GPU.
WHOLE = {
    aten.linear.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
    aten.rms_norm.default,
}
# Autograd takes these apart on the CPU; on a GPU, they are one kernel, and so many in the backward pass.
FUSED = {
    torch.rms_norm: 2,
    nn.functional.rms_norm: 2,
    nn.functional.scaled_dot_product_attention: 2,
    nn.functional.silu: 1,
}
# Kernels that CUDA alone has; one of them pads the rows of its log-sum-exp to a multiple.
PADDED = 32


def flash(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float, seqused_k: Tensor
) -> tuple[Any, ...]:
    """Attends rows [T, heads, D] of several slots to as many of their keys [rows, KV, D] as seqused_k says."""
    starts, places, *_ = args
    seen, sums = [], []
    for slot, used in enumerate(seqused_k.tolist()):
        rows = query[starts[slot] : starts[slot + 1]].transpose(0, 1)[None]
        columns = slice(int(places[slot]), int(places[slot]) + used)
        known = (
            x[columns].transpose(0, 1)[None].repeat_interleave(query.shape[1] // x.shape[1], 1)
            for x in (key, value)
        )
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(rows, *known, scale=scale)
        seen.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    # The kernel's output has the strides of the query.
    return (
        torch.empty_like(query).copy_(torch.cat(seen)),
        torch.cat(sums, dim=1),
        query.new_zeros(2),
        query.new_zeros(0),
        query.new_zeros(0),
    )


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *args: Any, scale: float
) -> tuple[Any, ...]:
    """Attends under a mask; the rows of the log-sum-exp are padded."""
    assert args == (True,)
    assert bias.shape[:-2] == query.shape[:-2]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias, scale=scale
    )
    return (
        out,
        nn.functional.pad(lse, (0, -lse.shape[-1] % PADDED), value=torch.nan),
        lse.new_zeros(2),
        lse.new_zeros(2),
    )


STANDS = {
    aten._flash_attention_forward.default: flash,
    aten._scaled_dot_product_efficient_attention.default: efficient,
}
FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "detach_",
    "_unsafe_view",
    "_reshape_alias",
}


def leaves(value: Any) -> list[Any]:
    """Returns what an operation's arguments hold; torch's own functions take most of these tests' time."""
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [leaf for item in value for leaf in leaves(item)]
        if isinstance(value, list | tuple)
        else [value]
    )


def mapped(change: Any, value: Any) -> Any:
    """Returns the arguments or results of an operation, each changed."""
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return (
        type(value)(mapped(change, item) for item in value)
        if isinstance(value, list | tuple)
        else change(value)
    )


class Stray(Exception):
    """Says what a GPU could not do, or not within a CUDA graph."""


class Remote(Tensor):
    """A tensor of the simulated device; `inner` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Remote:
        sizes = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        # A view of an ordinary tensor cannot be one of inference mode.
        with torch.inference_mode(False):
            remote = Tensor._make_wrapper_subclass(cls, inner.size(), device=NAME, **sizes)  # type: ignore[attr-defined]
        remote.inner = inner
        return remote

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Remote({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: Any = None, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Stray(f"{func} runs outside the simulated device")


class _Fused(torch.autograd.Function):
    """Runs one of `FUSED` with its gradient."""

    @staticmethod
    def forward(ctx: Any, device: Device, run: Any, func: Any, *given: Any) -> Any:
        ctx.device, ctx.func = device, func
        ctx.own = [tensor.inner.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        with torch.enable_grad():
            ctx.out = run(*ctx.own)
        device._record(device.kernels, func.__name__)
        return Remote(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        learned = [tensor for tensor in ctx.own if tensor.requires_grad]
        grads = iter(torch.autograd.grad(ctx.out, learned, grad.inner))
        for _ in range(FUSED[ctx.func]):
            ctx.device._record(ctx.device.kernels, f"{ctx.func.__name__} backward")
        own = (Remote(next(grads)) if tensor.requires_grad else None for tensor in ctx.own)
        return (None, None, None, *own)


class _FromHost(TorchFunctionMode):
    """Makes tensors of numbers on the host and copies them, as torch does for real devices."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [value for value in leaves((args, kwargs)) if isinstance(value, Remote)]
        fused = given and getattr(func, "__hash__", None) and func in FUSED
        if fused and not torch.is_inference_mode_enabled():

            def run(*own: Any) -> Any:
                known = {id(value): tensor for value, tensor in zip(given, own, strict=True)}
                plain, named = mapped(lambda value: known.get(id(value), value), (args, kwargs))
                return func(*plain, **named)

            return _Fused.apply(self._device, run, func, *given)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class Device(TorchDispatchMode):
    """While it is entered, everything of the device `NAME` is simulated.

    kernels: launches outside graphs. copies: transfers from the host. waits: reasons for which the host waited for the
    device, each with the line of ours that did it. capturing: within a CUDA graph neither is allowed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capturing = False
        self.reset()

    def reset(self) -> None:
        self.kernels, self.copies, self.waits = list[str](), list[str](), list[str]()

    def __enter__(self) -> Device:  # type: ignore[override]
        self._function_mode = _FromHost(self)
        self._function_mode.__enter__()
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *reason: Any) -> None:  # type: ignore[override]
        super().__exit__(*reason)
        self._function_mode.__exit__(*reason)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def put(self, module: nn.Module, *, trained: bool = False) -> nn.Module:
        """Moves a module's weights to the device. trained: they get gradients there."""
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and not isinstance(tensor, Remote):
                        own = Remote(tensor.detach())
                        held[name] = nn.Parameter(own) if trained and tensor.requires_grad else own  # type: ignore[assignment]
        return module

    def _record(self, events: list[str], what: Any) -> None:
        if events is not self.waits and not self.capturing:
            events.append(str(what))
        elif events is not self.kernels:
            ours = [frame for frame in traceback.extract_stack() if "medusa_cli" in frame.filename]
            line = (
                f"{what} at {ours[-1].filename.rpartition('medusa_cli/')[2]}:{ours[-1].lineno}"
                if ours
                else what
            )
            if self.capturing:
                raise Stray(f"a CUDA graph cannot hold {line}")
            events.append(line)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
        remote = [value for value in given if isinstance(value, Remote)]
        target = kwargs.get("device")
        if not remote and (target is None or torch.device(target).type != NAME):
            return func(*args, **kwargs)
        if func not in WHOLE and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self, torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        here = bool(remote) if target is None else torch.device(target).type == NAME
        if func in (aten._to_copy.default, aten.copy_.default):
            source = given[-1]
            if func is aten.copy_.default:
                here = isinstance(given[0], Remote)
            blocking = not (
                kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,))
            )
            if isinstance(source, Remote) and here:
                self._record(self.kernels, func)
            elif here:
                self._record(self.copies, func)
                if blocking:
                    self._record(self.waits, f"blocking copy {func}")
            else:
                self._record(self.waits, f"read {func}")
        else:
            if any(value.dim() and not isinstance(value, Remote) for value in given):
                raise Stray(f"{func} mixes tensors of the host and of the device")
            looks = bool(
                {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
            )
            if func._opname.startswith("index"):  # by places they are of fixed shapes
                looks = any(
                    getattr(value, "dtype", None) == torch.bool for value in leaves(args[1:2])
                )
            if looks:
                self._record(self.waits, func)
            returns = func._schema.returns
            view = returns and all(
                r.alias_info is not None and not r.alias_info.is_write for r in returns
            )
            if not view and func._opname not in FREE:
                self._record(self.kernels, func)
        if target is not None:
            kwargs["device"] = "cpu"
        values, named = mapped(
            lambda value: value.inner if isinstance(value, Remote) else value, (args, kwargs)
        )
        out = STANDS.get(func, func)(*values, **named)
        known = {id(value.inner): value for value in remote}
        known |= {id(value): value for value in given if not isinstance(value, Remote)}
        if not here:
            return out
        return mapped(
            lambda x: known[id(x)] if id(x) in known else Remote(x) if isinstance(x, Tensor) else x,
            out,
        )
