"""What all tests share: one thread, as tiny models lose by more; those marked gpu need a CUDA device."""

import os

import pytest

# Set before torch is imported. Two threads that wait for each other are many times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
