"""Ranks in which no object collective of torch's can come back unnoticed.

Whoever reaches a rank's port could run code in it. torch, FSDP and DeepSpeed have such collectives, too.
"""

from __future__ import annotations

from typing import NoReturn

from torch.distributed import distributed_c10d

UNPICKLES = "_tensor_to_object"


def refuse_pickles() -> None:
    """Let each collective that unpickles what arrives raise instead, in this process."""
    assert hasattr(distributed_c10d, UNPICKLES), "torch has another name for it"
    setattr(distributed_c10d, UNPICKLES, _refuse)


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("An object collective unpickles what arrives.")
