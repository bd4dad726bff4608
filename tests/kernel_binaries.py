"""Compiles Triton kernels for GPUs that need not be here, and prints what is in the binaries.

As `python -m tests.kernel_binaries 90`, for compute capability 9.0; one JSON list with an entry for each kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from medusa_cli.engine import kernel_attention, kernels, tile_kernels
from medusa_cli.engine.reach import CHUNK, NEAR
from medusa_cli.engine.tiles import LAYOUTS
from medusa_cli.native import Format
from medusa_cli.train import loss_kernel
from medusa_cli.tree import kernels as tree_kernels

# Integers that differ from pass to pass.
STRIDES = ("of_outline", "of_nodes", "of_children", "of_tokens")
FREE = {"rows", "rows_of_slot", "capacity", "chunks", "head", *STRIDES}
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def tile_matmul(format: Format, rows: int) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Returns the case of a format's tiles and a program's rows."""
    layout = LAYOUTS[format]
    places = dict(zip(("UPPER", "SCALE", "MINS", "D", "DMIN", "END"), layout.places, strict=True))
    sizes = dict(
        UNITS=layout.units,
        BITS=layout.bits,
        PLANES=layout.planes,
        GROUPS=layout.groups,
        ZERO=layout.zero,
    )
    own = dict(
        WIDE=6144, N=4096, K=2048, STEP=tile_kernels.STEPS[0], BM=rows, BN=tile_kernels.COLUMNS
    )
    pointers = "numbers scales sums words small halves bias out"
    options = {"num_warps": tile_kernels.WARPS[rows], **tile_kernels.UNFUSED}
    return "tile_matmul_kernel", pointers, {**places, **sizes, **own}, options


CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "matmul_kernel",
        "x weight out",
        dict(N=384, K=2048, SLICE=512, BM=64, BN=128, BK=64),
        dict(num_warps=4, num_stages=4),
    ),
    ("add_norm_kernel", "x parts gain out read", dict(H=4096, S=4, BH=4096), dict(num_warps=8)),
    (
        "rotate_write_kernel",
        "parts gains cos sin columns query keys values",
        dict(HEADS=32, KV=8, D=128, S=2, BD=128),
        dict(num_warps=1),
    ),
    ("gate_kernel", "parts out", dict(WIDE=11008, S=1, ACTIVATION=0, BLOCK=1024), {}),
    (
        "far_kernel",
        "query keys values limit low partial top total",
        dict(HEADS=32, KV=8, D=128, CAP=0.0, CHUNK=CHUNK, BM=64, BN=32, BD=128),
        dict(num_warps=4, num_stages=3),
    ),
    (
        "near_kernel",
        "query keys values places position limit low partial top total out",
        dict(HEADS=32, KV=8, D=128, CAP=0.0, CHUNK=CHUNK, NEAR=NEAR, BM=16, BD=128),
        dict(num_warps=2, num_stages=1),
    ),
    ("round_rows_kernel", "x numbers scales sums", dict(K=2048, BLOCK=64), tile_kernels.UNFUSED),
    tile_matmul(Format.Q4_K, tile_kernels.FEW),
    tile_matmul(Format.Q4_K, tile_kernels.MANY),
    tile_matmul(Format.Q6_K, tile_kernels.MANY),
    ("grow_kernel", "scores", dict(N=64, W=10, BN=64, BC=1024), {}),
    ("grow_kernel", "", dict(N=16, W=10, BN=16, BC=256), {}),
    ("longest_path_kernel", "", dict(N=64, P=32, BN=64, BP=32), {}),
    ("cross_entropy_kernel", "logits p", dict(BLOCK=loss_kernel.BLOCK), dict(num_warps=8)),
]
TYPES = {
    **dict.fromkeys(("out", "parts", "partial", "top", "total", "scales", "sums"), "*fp32"),
    **{"numbers": "*i8", "words": "*i32", "small": "*u8", "halves": "*fp16"},
    **dict.fromkeys(("weights", "losses"), "*fp32"),
    "right": "*u8",
    **dict.fromkeys(("targets", "p_rows"), "*i64"),
    **dict.fromkeys(("outline", "nodes", "ids", "new_nodes", "above"), "*i64"),
    **dict.fromkeys(("chosen", "tokens", "depth", "parents", "results"), "*i64"),
    **dict.fromkeys(("mask", "new_mask", "on_path"), "*u8"),
    **dict.fromkeys(("log_p", "new_scores"), "*fp32"),
    **dict.fromkeys(("order", "columns", "limit", "low", "places", "position"), "*i32"),
    **dict.fromkeys((*FREE, "width"), "i32"),
    **dict.fromkeys(("eps", "eps_after", "scale", "soft"), "fp32"),
}


def compiled(kernel: Any, pointers: str, sizes: dict[str, Any], options: Any, target: int) -> Any:
    names = list(kernel.arg_names)
    assert sizes.keys() <= set(names), f"{kernel.__name__} has no {sizes.keys() - set(names)}"
    types = dict(TYPES)
    if kernel.__name__ != "matmul_kernel":
        types["out"] = "*bf16"
    given = pointers.split()
    signature, constants, attrs = {}, {}, {}
    for place, name in enumerate(names):
        if name in sizes or (name not in types and name not in given):
            signature[name], constants[(place,)] = "constexpr", sizes.get(name)
        else:
            signature[name] = types.get(name, "*bf16")
        if name == "scores" and name in given:
            signature[name] = "*fp32"
        if name in ("bias", "after") and name not in given:
            signature[name], constants[(place,)] = "constexpr", None
        if signature[name].startswith("*"):
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={**kernel_attention.PINNED, **options}
    )


def described(kernel: Any, target: int, *case: Any) -> dict[str, Any]:
    """Returns what a kernel's binary for a target holds."""
    binary = compiled(kernel, *case, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()  # type: ignore[union-attr]
    free = {p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)}
    return {
        "kernel": kernel.__name__,
        "target": target,
        "registers": int(registers),
        "stack": int(stack),
        "shared": binary.metadata.shared,
        "atomics": re.findall(r"^\s*(?:@\S+\s+)?(?:atom|red)\.\S+", binary.asm["ptx"], re.M),
        "specialized": sorted(free & FREE),
    }


def main() -> None:
    modules = (
        vars(kernels)
        | vars(kernel_attention)
        | vars(tile_kernels)
        | vars(loss_kernel)
        | vars(tree_kernels)
    )
    binaries = [
        described(modules[name], target, *case)
        for target in map(int, sys.argv[1:])
        for name, *case in CASES
    ]
    print(json.dumps(binaries))


if __name__ == "__main__":
    main()
