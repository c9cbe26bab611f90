"""Rival writers save the same steps, and exactly one wins each round.

Two are of one generation, and one is of a fenced generation. They are processes of their own, which meet before each
round. `make kill-points` runs 1,000 rounds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_ranks import forked_ranks
from object_stores import JobStore
from spottrain.checkpoint.checkpointer import Checkpointer

SCRIPT = Path(__file__).with_name("checkpoint_rivals.py")
ROUNDS = 1000 if "SPOTTRAIN_KILL_POINTS" in os.environ else 20
WRITERS = {"one": 2, "other": 2, "late": 1}


@pytest.mark.timeout(900)
def test_exactly_one_writer_wins_each_step(job_store: JobStore, tmp_path: Path, fork: Any) -> None:
    barrier = fork.Barrier(len(WRITERS))
    rivals = [
        {
            "uri": job_store.uri,
            "endpoint_url": job_store.endpoint_url,
            "environment": job_store.environment,
            "name": name,
            "generation": generation,
            "rounds": ROUNDS,
            "barrier": barrier,
            "outcomes": str(tmp_path / name),
        }
        for name, generation in WRITERS.items()
    ]
    with forked_ranks(fork, SCRIPT, rivals, seconds=850) as writers:
        pass
    assert [writer.exitcode for writer in writers] == [0] * len(WRITERS)

    outcomes = {name: json.loads((tmp_path / name).read_text()) for name in WRITERS}
    wins = dict.fromkeys(WRITERS, 0)
    for of_round in zip(*outcomes.values(), strict=True):
        ((attempt, *_),) = {tuple(seen[1:]) for seen in of_round}  # all read the same HEAD
        (winner,) = [name for name, (outcome, _) in zip(WRITERS, of_round, strict=True) if outcome == "won"]
        assert f"-{winner}-" in attempt
        assert of_round[2][0] == "Fenced"
        wins[winner] += 1
    print(f"\n{job_store.kind}: {ROUNDS} rounds, won by {wins}")
    reader = Checkpointer(job_store.open(), generation=3, attempt_id="reader", rank=0, world_size=1)
    newest = reader.latest(verify=True)
    assert newest is not None
    state: dict[str, Any] = {"w": torch.zeros(5)}
    reader.load(lambda _: state, newest)
    assert newest.step == ROUNDS
    assert torch.equal(state["w"], torch.full((5,), float(ROUNDS)))
