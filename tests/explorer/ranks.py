"""The real step loop of one rank, collective by collective.

`Training.steps`, `StateSaver` and `CheckpointSchedule` are real. The other ranks, the checkpointer, the agent's files
and the computation of a step are questions to the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from explorer.replay import Position, Script, run
from explorer.store import Committed
from spottrain.checkpoint.errors import CheckpointError
from spottrain.data.batches import Batches
from spottrain.data.order import Permutation
from spottrain.loop.stopping import Stopping
from spottrain.loop.training import Training
from spottrain.recovery.interval import CommitInterval
from spottrain.recovery.saver import StateSaver
from spottrain.recovery.schedule import CheckpointSchedule
from spottrain.world.failures import Drained
from spottrain.world.stop_agreement import Ballot, Decision
from spottrain_api.contract.configuration import Interruptions
from spottrain_api.contract.reports import TrainerPhase
from spottrain_api.settings.interval import Interval

TOTAL_STEPS = 6
INTERVAL = "2steps"
SAVE_SECONDS = 0.5


class Reported(NamedTuple):
    """What the rank has reported to its agent."""

    phase: TrainerPhase = TrainerPhase.STARTING
    step: int = 0
    start_step: int = 0
    total_steps: int | None = None
    commit: Committed | None = None
    save_fails: bool = False


class _Reporter:
    """Stands for ProgressReporter, without its files and times."""

    def __init__(self) -> None:
        self.reported = Reported()
        self.step_seconds = None
        self.progress = SimpleNamespace(commit=None, stalled_seconds=0.0, checkpoint_interval=None, loss=None)

    def update(self, **changes: Any) -> None:
        known = {name: value for name, value in changes.items() if name in Reported._fields}
        if "checkpoint_failure" in changes:
            known["save_fails"] = changes["checkpoint_failure"] is not None
        self.reported = self.reported._replace(**known)

    note = update

    def step(self, step: int, **_: Any) -> None:
        self.update(step=step)

    def milestone(self, name: str) -> None:
        """Times are the world's."""


class _Reports:
    """Stands for CheckpointReports."""

    def __init__(self, reporter: _Reporter) -> None:
        self._reporter = reporter

    def saved(self, handle: _Handle, timings: object, clean_up_failure: str | None) -> None:
        self._reporter.update(checkpoint_failure=None)
        if handle.commit is not None:
            self._reporter.update(commit=handle.commit)

    def failed(self, error: CheckpointError) -> None:
        self._reporter.update(checkpoint_failure=error)

    def saving(self) -> None:
        self._reporter.update(phase=TrainerPhase.SAVING)

    def ignore(self, *_: object) -> None:
        """What people read changes nothing."""

    resumed = stalled = warn = slow = intervals = ended_early = ignore


class _Handle:
    """A save, as the training thread sees it."""

    staging_seconds, upload_seconds, commit_seconds = 0.0, SAVE_SECONDS, 0.0
    bytes = 0
    writes_frozen_weights = False

    def __init__(self, script: Script, number: int, step: int) -> None:
        self._script, self._number, self.step = script, number, step
        self.commit: Committed | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        is_over, commit, error = self._script.ask("done", self._number)
        self.commit = commit
        self.error = error.exception() if error is not None else None
        return bool(is_over)


class _Checkpointer:
    """Stands for Checkpointer: its collectives are questions."""

    clean_up_failure = None
    pieces_of = None

    def __init__(self, script: Script) -> None:
        self._script = script

    def save(self, state: object, *, step: int, deadline_seconds: float | None, **_: Any) -> _Handle:
        handle = _Handle(self._script, -1, step)
        handle.commit = self._script.ask("save", step)
        return handle

    def save_in_background(self, state: object, *, step: int, **_: Any) -> _Handle | None:
        number = self._script.ask("save in background", step)
        return None if number is None else _Handle(self._script, number, step)

    def settle(self, timeout_seconds: float | None = None) -> None:
        self._script.ask("settle saves")

    def share_failures(self, timeout_seconds: float | None = 0.0) -> None:
        self._script.ask("share failures")

    def prepare(self, state: object, **_: Any) -> None:
        """Changes nothing that the world sees."""

    def clean_up(self, retention: object) -> int:
        return 0

    @property
    def has_failed(self) -> bool:
        return bool(self._script.ask("has failed"))


class _Agreement:
    """Stands for StopAgreement.

    The ballots and decisions are real. The sums come from the world.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._is_cast = False

    def start(self, ballot: Ballot) -> None:
        # The forecast has a clock in it.
        self._script.ask("cast", replace(ballot, save_seconds=round(ballot.save_seconds, 1)))
        self._is_cast = True

    def read(self) -> Decision:
        if not self._is_cast:
            return Decision()
        self._is_cast = False
        decision: Decision = self._script.ask("read")
        return decision

    def settle(self, ballot: Ballot) -> Decision:
        self.read()
        self.start(ballot)
        return self.read()

    def least(self, value: float) -> float:
        smallest: float = self._script.ask("least", value)
        return smallest


class _Flag:
    """Stands for DrainFlag, without its file: once seen, it stays set."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._is_seen = False

    def is_set(self, *, last_safe_seconds: float | None = None) -> bool:
        self._is_seen = self._is_seen or bool(self._script.ask("flag"))
        return self._is_seen

    def is_at_risk(self) -> bool:
        return False

    def seconds_left(self) -> float:
        left: float = self._script.ask("seconds left")
        return left


class _Data:
    """Stands for RankData: no samples."""

    plan = SimpleNamespace(world_size=1, global_batch=1, num_micro_batches=0)
    order = Permutation(num_samples=1)
    batches = Batches(order, global_batch=1)

    def begin(self, length: int, *, by_epoch: bool, last_step: int | None = None) -> dict[str, Any]:
        self.batches = Batches(self.order, global_batch=1, by_epoch=by_epoch, length=length, last_step=last_step)
        return {}

    def steps_schedule(self, step: int) -> bool:
        return True

    def tokens(self, step: int) -> None:
        """Nobody counts."""

    def num_samples(self, step: int) -> None:
        """Nobody counts."""

    def facts(self, step: int) -> dict[str, Any]:
        return {}

    def record(self, step: int) -> None:
        """Nobody looks."""

    def load(self, **_: Any) -> Any:
        return SimpleNamespace(close=lambda: None, pop_wait=lambda: 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Stands for TrainingState: no tensors."""

    models: Any
    optimizers: Mapping[str, Any] = field(default_factory=lambda: {"optimizer": None})
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None

    def tensors(self) -> dict[str, Any]:
        return {}

    def frozen(self) -> set[str]:
        return set()

    extra = rank_state = tensors
    alike = frozen


class _Boundaries:
    """Stands for Stopping: steps are short, and the ranks stop at their boundaries alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is no listener."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in vars(Stopping):
            raise AttributeError(name)
        return lambda *_, **__: None


@lru_cache(maxsize=200_000)
def stand_of_rank(number: int, start: Committed | None, log: tuple[Any, ...]) -> tuple[Position, Reported]:
    """Return the position of rank `number`, and what it has reported.

    Its generation resumes from `start`.
    """
    reporter = _Reporter()

    def program(script: Script) -> str:
        training = _training(number, start, script, reporter)
        try:
            for step in training.steps(TOTAL_STEPS):
                script.ask("step")
                step.update()
        except Drained:
            return "drained"
        return "succeeded"

    return run(program, log), reporter.reported


def _training(number: int, start: Committed | None, script: Script, reporter: _Reporter) -> Training:
    schedule = CheckpointSchedule(interval=CommitInterval.of(Interval.parse(INTERVAL), Interruptions()))
    reports = _Reports(reporter)
    saver = StateSaver(
        checkpointer=cast(Any, _Checkpointer(script)),
        schedule=schedule,
        reports=cast(Any, reports),
        retention=cast(Any, None),
        sleep=lambda seconds: script.ask("sleep", seconds),
    )

    def resume(*_: Any, **__: Any) -> int:
        if start is not None:
            saver.committed_step = start.step
            reporter.update(commit=start)
        return saver.committed_step

    restorer = SimpleNamespace(resume=resume)
    context = SimpleNamespace(
        rank=number,
        device=None,
        agreement=_Agreement(script),
        drain=_Flag(script),
        reporter=reporter,
        sleep=None,
    )
    engine = SimpleNamespace(update=lambda: None, try_load=lambda: None)
    return Training(
        model=cast(Any, None),
        engine=cast(Any, engine),
        state=cast(Any, _State(models=engine)),
        data=cast(Any, _Data()),
        context=cast(Any, context),
        recovery=cast(Any, SimpleNamespace(schedule=schedule, saver=saver, restorer=restorer, reports=reports)),
        guard=None,
        stopping=cast(Any, _Boundaries),
    )
