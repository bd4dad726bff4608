"""The device of the GPU probe, its models, and how work on it is timed and counted."""

import gc
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from medusa_cli.device import best_time, copy_bandwidth, event_time, synchronize
from medusa_cli.drafters import MedusaHeads
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import load_backbone, plain_kernels
from medusa_cli.engine.exact import ExactPath
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.model import Backbone
from medusa_cli.model.load import SHAPES
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import tiny_backbone

MODELS = {
    "0.5b": "random:0.5b",
    "1b": "random:1b",
    "1b-int4": "random:1b",
    "1b-long": "random:1b-long",
    "7b": "random:llama-2-7b",
}
ROWS = (1, 8, 16, 64)
# Replays of a timed graph.
REPLAYS = 20
# Medusa's heads; levels of other drafters, and the words of their vocabulary.
HEADS = 4
LEVELS, WORDS = 5, 12_288


class Lab:
    """Holds the device and one model at a time. smoke: tiny shapes on a CPU. folder: for a training's files."""

    def __init__(self, smoke: bool, device: str, folder: Path) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else device)
        self.folder = folder
        self.rows = (1, 8) if smoke else ROWS
        self.rounds = 1 if smoke else 3
        # Graphs are forced, or steps run as they are.
        self.graphs = self.device.type == "cuda"
        self._loaded: dict[str, Backbone] = {}

    @property
    def dtype(self) -> str:
        """Returns the number type of models: bf16 where the GPU computes in it."""
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(self.device)

    @property
    def kernels(self) -> Any:
        """Returns the kernels, or their plain twins on a CPU."""
        if self.smoke:
            return plain_kernels
        from medusa_cli.engine import kernels

        return kernels

    def free(self) -> None:
        """Frees the model and what else is not in use."""
        self._loaded.clear()
        gc.collect()
        if self.graphs:
            torch.cuda.empty_cache()

    def model(self, name: str) -> Backbone:
        """Returns a model; the one before it is freed."""
        if name not in self._loaded:
            self.free()
            if self.smoke:
                self._loaded[name] = tiny_backbone(engine="torch")
            else:
                *sizes, _ = SHAPES["1b"]
                SHAPES["1b-long"] = (*sizes, 32_768)
                quantize = "int4" if name.endswith("int4") else None
                options = LoadOptions(str(self.device), self.dtype, "torch", quantize)
                self._loaded[name] = load_backbone(MODELS[name], options)
            self._loaded[name].engine.captures = self.graphs
        return self._loaded[name]

    def choose(self, backbone: Backbone, path: str) -> TorchEngine:
        """Lets a model's steps take the exact path or today's; the caches of earlier decoders are freed."""
        gc.collect()
        engine = backbone.engine
        assert isinstance(engine, TorchEngine)
        engine.exact = ExactPath(engine, self.kernels) if path == "exact" else None
        return engine

    def medusa(self, backbone: Backbone) -> MedusaHeads:
        return MedusaHeads.create(backbone, HEADS, 1, "own").to(backbone.dtype).eval()

    def with_draft_vocabulary(self, kind: type[HeadDrafter], backbone: Backbone) -> HeadDrafter:
        words = torch.arange(min(WORDS, backbone.vocab_size))
        drafter = kind.create(backbone, LEVELS, 1, "draft", words)
        return drafter.to(backbone.dtype).eval()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Returns the time of a computation within a CUDA graph, in a chain of replays."""
        work()
        if self.device.type == "cpu":
            return best_time(self.device, work, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPLAYS):
                work()
        return event_time(self.device, graph.replay) / REPLAYS

    def kernels_of(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Returns the kernels of a computation on a GPU: their number, the sum of their times, and the longest."""
        if not self.graphs:
            return {}
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as record:
            work()
            synchronize(self.device)
        times = {
            event.key[:60]: (event.count, event.self_device_time_total)
            for event in record.key_averages()
        }
        longest = sorted(times, key=lambda key: -times[key][1])[:12]
        return {
            "kernels": sum(count for count, _ in times.values()),
            "busy_ms": sum(us for _, us in times.values()) / 1e3,
            "longest": {key: times[key] for key in longest},
        }
