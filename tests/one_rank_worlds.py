"""The world of a single rank in the test's own process, as a pytest plugin.

conftest.py loads this for all tests, and torch takes seconds to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture
def world_of_its_own() -> Iterator[None]:
    """End the world of one rank that the test's session has made. Its steps don't count as long on a busy machine.

    DeepSpeed and Accelerate note worlds in the environment, also those of earlier tests.
    """
    with patch.dict(os.environ), patch("spottrain.world.listener.LISTEN_AFTER_SECONDS", 600.0):
        os.environ.pop("LOCAL_RANK", None)
        yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_accelerator_afterwards(world_of_its_own: None) -> Iterator[None]:
    """End the state that Accelerate keeps of that world."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
