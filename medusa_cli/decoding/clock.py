"""How long each part of a decoding step takes."""

import time

import torch

from medusa_cli.backbone import Backbone


class Clock:
    """Seconds between laps, with the device's queue drained before each reading."""

    def __init__(self, backbone: Backbone) -> None:
        self._device = backbone.device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        now = self._now()
        elapsed, self._last = now - self._last, now
        return elapsed
