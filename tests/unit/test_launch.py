"""What a rank reads of the generation that its agent started."""

from __future__ import annotations

import ctypes
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from spottrain.world.failures import UserError
from spottrain.world.launch import PROCESS_GROUP_TIMEOUT, Launch, join_world, process_started_at
from spottrain_api.contract.names import FILE_RUN


def read_config(run_dir: Path | None) -> None:
    launch = Launch(
        rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), run_dir=run_dir
    )
    assert launch.read_config() is None


def test_without_an_agent_there_is_nothing_to_read() -> None:
    read_config(None)


def test_a_run_directory_without_its_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"SPOTTRAIN_RUN_DIR is set, but there is no .*; unset it to run without"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"generation": "first"}'], ids=["no JSON", "another type"])
def test_a_file_that_can_not_be_read_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_RUN).write_text(content)
    with pytest.raises(UserError, match=r"can't be read"):
        read_config(tmp_path)


def test_a_rank_whose_name_ends_within_a_letter_knows_its_start() -> None:
    pid = os.fork()
    if pid == 0:
        is_known = False
        try:
            ctypes.CDLL(None).prctl(15, "обучение модели".encode(), 0, 0, 0)  # the kernel keeps 15 bytes of it
            is_known = abs(datetime.now(UTC) - process_started_at()) < timedelta(hours=1)
        finally:
            os._exit(0 if is_known else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_around_a_checkpoint_ranks_wait_for_each_other_as_long_as_a_slow_store_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts: list[timedelta] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.new_group", lambda *, backend, timeout: timeouts.append(timeout))
    monkeypatch.setattr("spottrain.world.launch.DEVICES", Path("/nowhere"))
    join_world(
        Launch(rank=0, local_rank=0, world_size=2, local_world_size=2, device=torch.device("cpu"), run_dir=None)
    )
    agreement, checkpoint = timeouts
    assert agreement == PROCESS_GROUP_TIMEOUT
    assert checkpoint >= timedelta(hours=24)
