"""The process that writes what a rank has staged.

The tests run it on each store, and end it or its rank.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_ranks import forked_ranks
from object_stores import JobStore
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain_agent.processes import is_alive

SCRIPT = Path(__file__).with_name("writer_ranks.py")


@pytest.fixture
def run(fork: Any, tmp_path: Path) -> Any:
    """Runs a scenario of writer_ranks.py; returns what it found, and its log."""

    def run(scenario: str, uri: str, exit_code: int = 0, **settings: Any) -> tuple[dict[str, Any], str]:
        found, log = tmp_path / "found.json", tmp_path / "log"
        given: dict[str, Any] = {"scenario": scenario, "uri": uri, "endpoint_url": None, "environment": {}}
        given |= {"found": str(found), "log": str(log), **settings}
        with forked_ranks(fork, SCRIPT, [given]) as ranks:
            pass
        assert ranks[0].exitcode == exit_code
        return json.loads(found.read_text()), log.read_text() if log.exists() else ""

    return run


def place(store: JobStore) -> dict[str, Any]:
    """What a scenario needs to know of a store."""
    return {
        "uri": store.uri,
        "endpoint_url": store.endpoint_url,
        "environment": store.environment,
        "is_folder": store.is_folder,
    }


def test_the_writer_stores_what_the_rank_has_staged(run: Any, job_store: JobStore) -> None:
    found, log = run("save", **place(job_store))

    assert log == ""
    memory = [path for path in found["held"] if "spottrain-staging" in path]
    assert len(memory) == 1, found["held"]  # not of former sizes
    if job_store.is_folder:
        assert len(found["held"]) == 2, found["held"]  # and the connection, but nothing of the rank's
        assert found["grown"] <= 2, "staging memory of former sizes is still open"
    reader = Checkpointer(job_store.open(), generation=2, attempt_id="b", rank=0, world_size=1)
    newest = reader.latest(verify=True)
    assert newest is not None
    into = {"model": {"w": torch.zeros(9_000_000), "empty": torch.empty(0)}}
    reader.load(lambda _: into, newest)
    assert torch.equal(into["model"]["w"], torch.arange(9_000_000, dtype=torch.float32))


def test_the_writer_is_ready_before_the_first_save(run: Any, job_store: JobStore) -> None:
    found, _ = run("prepare", **place(job_store))

    assert found["mapped"] >= 12_000_000
    if not job_store.is_folder:
        assert found["connected"]


def test_a_rank_whose_writer_is_killed_writes_itself(run: Any, tmp_path: Path) -> None:
    found, log = run("lose", f"file://{tmp_path}/store")

    assert found["commits"] == [2, 3]
    assert log.count("was killed by signal 9. Rank 0 writes its checkpoints itself from now on.") == 1


def test_an_error_of_the_store_is_the_same_from_the_writer(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found, _ = run("fail", f"file://{tmp_path}/store", missing_uri=f"file://{tmp_path}/file")

    assert found["error"] == "StorageDenied"
    assert f"{tmp_path}/file" in found["message"]
    assert found["commit"] == 2


def test_an_interrupted_save_leaves_no_answer_for_the_next(run: Any, tmp_path: Path) -> None:
    found, _ = run("interrupt", f"file://{tmp_path}/store")

    assert found == {"interrupted": True, "commit": 2, "writer": False}


def test_a_rank_without_descriptors_fails_a_save_and_makes_the_next(run: Any, tmp_path: Path) -> None:
    found, _ = run("starve", f"file://{tmp_path}/store")

    assert found["failed"]
    assert found["commit"] == 3


def test_what_was_staged_is_written_also_where_the_buffer_grows_meanwhile(run: Any, tmp_path: Path) -> None:
    found, _ = run("change", f"file://{tmp_path}/store")

    assert found["same"]


def test_the_writer_ends_with_its_rank(run: Any, tmp_path: Path) -> None:
    found, _ = run("die", f"file://{tmp_path}/store", exit_code=-9)

    give_up_at = time.monotonic() + 30
    while is_alive(found["pid"]):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
