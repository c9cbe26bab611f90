"""Sessions of one rank, one after the other, in a single world: to join one takes longer than a session takes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import spottrain.loop.joined as joined_module
from process_groups import end_groups, process_groups
from spottrain.world.launch import Groups, Launch, join_world
from spottrain.world.listener import Rounds, StoreRounds, rounds_of


def run_sessions(cases: Iterable[tuple[str, Callable[[], None]]]) -> dict[str, dict[str, str]]:
    """Run cases, each of one session, and return by name the sentence that refused one, or its traceback.

    A case may end with SystemExit, as after a drain. After a traceback, no more cases are run: the other ranks may be
    in another collective by then.
    """
    groups: dict[str, Groups] = {}
    of_the_world: set[dist.ProcessGroup] = set()
    found: dict[str, dict[str, str]] = {}

    def join_once(launch: Launch) -> Groups:
        if "all" not in groups:
            groups["all"] = join_world(launch)
            of_the_world.update(process_groups())
        return groups["all"]

    def rounds_of_case(rank: int, world_size: int) -> Rounds:
        """Keys of its own in the store, so that no case hears of the notice of another."""
        if world_size == 1:
            return rounds_of(rank, world_size)
        return StoreRounds(PrefixStore(name, _get_default_store()), rank=rank, world_size=world_size)

    def said(_: object, sentence: str) -> None:
        found[name] = {"refused": sentence}

    with (
        patch.object(joined_module, "join_world", join_once),
        patch.object(joined_module, "rounds_of", rounds_of_case),
        patch.object(dist, "destroy_process_group"),
        patch("spottrain.loop.entry.logs.say", said),
    ):
        for name, run in cases:
            try:
                run()
            except SystemExit:
                pass
            except BaseException:
                found[name] = {"error": traceback.format_exc()}
                break
            end_groups(process_groups() - of_the_world)
    return found
