"""Computes bytes and FLOPs of a 7B model's steps by rows, and their least times on GPUs: the table of docs/gpu.md."""

from dataclasses import dataclass

ROWS = (1, 8, 16, 32, 64, 128)
CONTEXT = 1024
# A whole cache, a bucket of it, and a short text with its tree.
COLUMNS = (4096, 512, 364)
BYTES = 2  # bf16


@dataclass(frozen=True)
class Gpu:
    """Bandwidth in bytes a second and dense bf16 FLOPs a second, as the vendor states them."""

    name: str
    bandwidth: float
    flops: float

    def seconds(self, bytes_read: float, flops: float) -> float:
        """Returns the least seconds of a step: the longer of reading and computing, as the two overlap."""
        return max(bytes_read / self.bandwidth, flops / self.flops)


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama, kv_width being that of all key heads, and of its Medusa heads with their vocabulary."""

    hidden: int = 4096
    inner: int = 11_008
    layers: int = 32
    kv_width: int = 4096
    vocabulary: int = 32_000
    heads: int = 4
    draft_vocabulary: int = 12_288

    @property
    def weights(self) -> int:
        """Weights that a step reads; of the embedding table it reads a few rows."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary

    @property
    def drafter_weights(self) -> int:
        """Weights of Medusa heads of one residual block."""
        return self.heads * (self.hidden**2 + self.hidden * self.draft_vocabulary)

    def row_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_width * BYTES

    def step(self, rows: int, context: int) -> tuple[float, float]:
        """Returns bytes read and FLOPs of a pass over `rows` rows behind `context` tokens."""
        attention = 4 * rows * (context + rows) * self.hidden * self.layers
        return BYTES * self.weights + (context + rows) * self.row_bytes(), 2 * rows * self.weights + attention


GPUS = (
    Gpu("A100 80 GB", 2.039e12, 312e12),
    Gpu("H100 SXM", 3.35e12, 989e12),
    Gpu("H200", 4.8e12, 989e12),
    Gpu("RTX 4090", 1.008e12, 165e12),
)


def table(model: Model = Model()) -> str:
    """Returns the table in Markdown: a line a number of rows, least milliseconds by GPU."""
    lines = [f"| rows | GB read | TFLOPs | {' | '.join(gpu.name for gpu in GPUS)} |", "|" + "---|" * (3 + len(GPUS))]
    for rows in ROWS:
        bytes_read, flops = model.step(rows, CONTEXT)
        times = [f"{1e3 * gpu.seconds(bytes_read, flops):.2f}" for gpu in GPUS]
        lines.append(f"| {rows} | {bytes_read / 1e9:.2f} | {flops / 1e12:.3f} | {' | '.join(times)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    own = Model()
    print(
        f"drafting reads {BYTES * own.drafter_weights / 1e9:.2f} GB, a token's cache is {own.row_bytes() / 1e6:.2f} MB"
    )
    for gpu in GPUS:
        print(
            f"{gpu.name}: drafting {1e3 * BYTES * own.drafter_weights / gpu.bandwidth:.2f} ms; "
            f"{', '.join(f'{n:,} columns {1e3 * n * own.row_bytes() / gpu.bandwidth:.2f} ms' for n in COLUMNS)}; "
            f"rows until computing takes as long as reading: {gpu.flops / gpu.bandwidth * BYTES / 2:.0f}"
        )
