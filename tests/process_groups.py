"""The process groups of one case after another, in ranks that live on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world, destroy_process_group


def process_groups() -> Set[ProcessGroup]:
    """All that are there."""
    return frozenset(_world.pg_map)


@contextmanager
def groups_of_its_own() -> Iterator[None]:
    """End the process groups that the block makes. A collective.

    Not for meshes of several dimensions: torch keeps the names of their groups for the next mesh of the same form.
    """
    before = process_groups()
    try:
        yield
    finally:
        end_groups(process_groups() - before)


def end_groups(groups: Set[ProcessGroup]) -> None:
    """End these groups, and their threads, each of which wakes up a hundred times a second.

    Some hundred groups would take as much of the processor as what is tested.
    """
    for group in groups - _kept_by_deepspeed():
        destroy_process_group(group)
    gc.collect()


def _kept_by_deepspeed() -> Set[ProcessGroup]:
    """Those that it makes once in a process."""
    values = vars(sys.modules["deepspeed.utils.groups"]).values() if "deepspeed.utils.groups" in sys.modules else ()
    return {each for each in values if isinstance(each, ProcessGroup)}
