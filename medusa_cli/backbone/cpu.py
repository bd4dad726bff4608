"""What this CPU can do, as far as the choice of kernels needs to know; MEDUSA_CPU=avx2 makes it look smaller."""

import os

import torch


def limited() -> bool:
    """Whether the environment asks for a CPU without AVX-512 and bf16, as most desktops are."""
    return os.environ.get("MEDUSA_CPU", "").lower() == "avx2"


def has_bf16() -> bool:
    """Whether the CPU multiplies bf16 numbers: without such instructions bf16 is many times slower than fp32."""
    return not limited() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
