"""Generations of real ranks on gloo over one checkpoint store.

A test gives them scripted faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from forked_ranks import forked_ranks, rank_environments
from spottrain.checkpoint.format.commits import Head
from spottrain.checkpoint.format.head import read_head
from spottrain.checkpoint.stores.storage import CheckpointStorage
from spottrain.checkpoint.stores.uri import open_storage
from spottrain_api.contract.configuration import DrainRequest
from spottrain_api.contract.replicas import ReplicaSettings
from spottrain_api.contract.reports import CommitRef, Outcome, OutcomeKind, Progress
from spottrain_api.settings.stability import StabilityConfig

SCRIPT = Path(__file__).parent / "integration" / "trainer_script.py"
STEPS = 14
Faults = dict[int, dict[Any, str]]  # rank -> step, or a place in it, such as "3.1" -> what happens there


@dataclass
class Run:
    """One job: generations of ranks over one checkpoint folder."""

    folder: Path
    fork: Any
    script: Path = SCRIPT
    strategy: str = "ddp"
    dropout: float = 0.0
    uri: str | None = None
    endpoint_url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of the script
    global_batch: int = 10
    interval: str = "3steps"
    checkpoint: dict[str, Any] = field(default_factory=dict)  # more of the spec's checkpoint, as YAML names it
    spec: dict[str, Any] = field(default_factory=dict)  # more of the spec, as YAML names it
    step_seconds: float = 0.0
    upload_seconds: dict[int, float] = field(default_factory=dict)  # by step
    num_samples: int = 46
    width: int = 8
    kill_at: dict[int, int] = field(default_factory=dict)  # rank -> number of an operation on the store
    stability: StabilityConfig | None = None
    resume: CommitRef | None = None
    replicas: Callable[[int], ReplicaSettings | None] = lambda rank: None
    leave_after: int | None = None
    generation: int = 0
    outcomes: list[Outcome | None] = field(default_factory=list)
    exit_codes: list[int | None] = field(default_factory=list)

    def generate(self, world_size: int, faults: Faults | None = None, steps: int = STEPS) -> list[Outcome | None]:
        """Run the next generation to its end; each rank's outcome."""
        with self.running(world_size, faults, steps):
            pass
        return self.outcomes

    @contextmanager
    def running(self, world_size: int, faults: Faults | None = None, steps: int = STEPS) -> Iterator[None]:
        """Run the next generation while the block runs, and on to its end.

        If the block fails, the generation ends.
        """
        self.generation += 1
        settings = [
            self._settings(rank, environment, (faults or {}).get(rank, {}), steps)
            for rank, environment in enumerate(rank_environments(world_size))
        ]
        with forked_ranks(self.fork, self.script, settings) as ranks:
            yield
        self.exit_codes = [process.exitcode for process in ranks]
        self.outcomes = [Outcome.read(self.run_dir(rank) / "outcome-0.json") for rank in range(world_size)]

    def drain(self, rank: int = 0, *, seconds: float = 30.0) -> None:
        """Ask a rank of the running generation to drain."""
        now = datetime.now(UTC)
        request = DrainRequest(reason="test", deadline=now + timedelta(seconds=seconds), requested_at=now)
        request.write(self.run_dir(rank) / "drain.json")

    def run_dir(self, rank: int) -> Path:
        """Each rank is in a pod of its own, with a run directory of its own."""
        return self.folder / f"run-{self.generation}-{rank}"

    def progress(self, rank: int = 0) -> Progress:
        found = Progress.read(self.run_dir(rank) / "progress-0.json")
        assert found is not None
        return found

    def storage(self) -> CheckpointStorage:
        """Where the ranks commit."""
        return open_storage(self.uri or f"file://{self.folder}/checkpoints", endpoint_url=self.endpoint_url)

    def head(self) -> Head | None:
        return read_head(self.storage())

    def parameters(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "result.pt", weights_only=True)
        return found

    def losses(self) -> dict[str, float]:
        found: dict[str, float] = json.loads((self.folder / "result.json").read_text())
        return found

    def step_losses(self) -> dict[str, float]:
        """What `Training.step_loss` has given in the newest generation, by step."""
        found: dict[str, float] = json.loads((self.folder / "result.exact.json").read_text())
        return found

    def seen(self) -> list[list[int]]:
        """The step numbers in the script's own variable at the end, by rank."""
        return [
            json.loads((self.folder / f"result.pt-seen-{rank}").read_text()) for rank in range(len(self.outcomes))
        ]

    def _settings(self, rank: int, environment: dict[str, str], faults: dict[Any, str], steps: int) -> dict[str, Any]:
        run_dir = self.run_dir(rank)
        run_dir.mkdir(parents=True)
        replicas = self.replicas(rank)
        settings = {
            "job": "test",
            "generation": self.generation,
            "attemptId": f"attempt{self.generation}",
            "seed": 5,
            "strategy": self.strategy,
            "batch": {"global": self.global_batch, "micro": 3},
            "checkpoint": {
                "uri": self.uri or f"file://{self.folder}/checkpoints",
                "endpointURL": self.endpoint_url,
                "interval": self.interval,
                **self.checkpoint,
            },
            "stability": self.stability.to_dict() if self.stability is not None else None,
            "resume": self.resume.model_dump(mode="json") if self.resume is not None else None,
            "replicas": replicas.model_dump(mode="json") if replicas is not None else None,
            **self.spec,
        }
        (run_dir / "run.json").write_text(json.dumps(settings))
        return {
            "environment": {
                **environment,
                "SPOTTRAIN_RUN_DIR": str(run_dir),
                "SPOTTRAIN_AUDIT_DIR": str(self.folder / "audit"),
                **self.environment,
            },
            "faults": faults,
            "steps": steps,
            "dropout": self.dropout,
            "step_seconds": self.step_seconds,
            "upload_seconds": self.upload_seconds,
            "leave_after": self.leave_after,
            "num_samples": self.num_samples,
            "width": self.width,
            "errnos": [f"{self.folder}/errno", f"{self.folder}/errno-{rank}"],
            "kill_at": self.kill_at.get(rank),
            "frozen": False,
            "has_norm": False,
            "takes_steps_for_long": 0.0,
            "commits_at_once": False,
            "step_loss": False,
            "epochs": None,
            "order": None,
            "shards": None,
            "streams": None,
            "num_workers": None,
            "export_first": False,
            "uri": self.uri or f"file://{self.folder}/checkpoints",
            "endpoint_url": self.endpoint_url,
            "result": str(self.folder / "result.pt"),
            **self.settings,
        }


def assert_drained(run: Run) -> int:
    """Check that all ranks drained at the same, committed step, and return it."""
    outcomes = [outcome for outcome in run.outcomes if outcome is not None]
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.DRAINED] * len(run.outcomes)
    assert set(run.exit_codes) == {0}
    (step,) = {outcome.step for outcome in outcomes}
    if step > 0:
        assert {outcome.commit.step for outcome in outcomes if outcome.commit is not None} == {step}
        head = run.head()
        assert head is not None
        assert head.newest is not None
        assert head.newest.step == step
    return step


def assert_succeeded(run: Run) -> None:
    assert [outcome and outcome.kind for outcome in run.outcomes] == [OutcomeKind.SUCCEEDED] * len(run.outcomes)
