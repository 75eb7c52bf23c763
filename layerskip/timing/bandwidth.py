"""Measures how fast a device reads memory: no pass over few tokens can be faster."""

from __future__ import annotations

from collections.abc import Callable

import torch

SIZE = 256 << 20  # bytes per sweep: more than caches hold, but quick to read in a benchmark


class Sweeps:
    """Sweeps over a buffer; each adds up its float32 numbers on torch's threads.

    Args:
        now: a clock in seconds that waits for the device's pending work.
        size: bytes of the buffer, which lives as long as this object.
    """

    def __init__(self, device: torch.device, now: Callable[[], float], size: int = SIZE) -> None:
        self.buffer = torch.ones(size // 4, device=device)
        self.now = now

    def __call__(self) -> float:
        """Bytes per second of one sweep."""
        start = self.now()
        self.buffer.sum()
        return self.buffer.nbytes / (self.now() - start)
