"""A record of which samples each step used.

If SPOTTRAIN_AUDIT_DIR is set, every rank of every generation appends to a file of its own: a header that says what
the order should be, then one line per completed step. `read_audit` merges the files, and `Audit.problems` compares
them with the order of a run that was never interrupted.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ValidationError

from spottrain.data.batches import Batches
from spottrain.data.order import DataOrder, Permutation

logger = logging.getLogger(__name__)


class AuditHeader(BaseModel):
    """Inputs that determine the order of the samples. They are the same in every file of a run.

    Attributes:
        seed: Seed of the order.
        shuffle: Whether the order is random.
        num_samples: Samples of the data set.
        global_batch: Samples of a batch.
        order: Kind of the order: `DataOrder.kind`.
        loop: "steps" if batches run on from one epoch into the next, "epochs" if each epoch has a last batch.
    """

    seed: int
    shuffle: bool
    num_samples: int
    global_batch: int
    order: str = Permutation.KIND
    loop: str = "steps"


class AuditRecord(BaseModel):
    """The samples that one rank used for one completed step.

    Attributes:
        at: When the rank completed the step, in Unix seconds.
        generation: Generation that completed it. A later job begins with generation 1 again.
        attempt: Id of that generation's start, which no other start has. Empty in a run that has neither
            an operator nor a store.
        step: Number of the step, from 1.
        rank: Number of the rank.
        world: Number of ranks.
        positions: Positions of the samples in the order of the run.
        samples: Indices of the samples in the data set.
    """

    at: float
    generation: int
    attempt: str = ""
    step: int
    rank: int
    world: int
    positions: tuple[int, ...]
    samples: tuple[int, ...]


class AuditWriter:
    """Appends the records of one rank in one generation.

    Each line is with the kernel before `write` returns. If one can't be written, as on a full disk, training goes on
    without a record of this step and those that follow.
    """

    def __init__(self, folder: Path, header: AuditHeader, *, generation: int, rank: int) -> None:
        """Raises ValueError if there is no such folder, and none can be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"SPOTTRAIN_AUDIT_DIR is {folder}, and that folder can't be made: {error.strerror}; name one on a "
                "volume to which the trainer may write, or leave it out"
            ) from error
        self._path = folder / f"audit-{generation:06d}-{rank:05d}.jsonl"
        self._file: TextIO | None = None
        with self._unless_refused():
            self._file = self._path.open("a", buffering=1)
            self._file.write(header.model_dump_json() + "\n")

    def write(self, record: AuditRecord) -> None:
        if self._file is None:
            return
        with self._unless_refused():
            self._file.write(record.model_dump_json() + "\n")

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("Samples are no longer recorded in %s, and training goes on: %s", self._path, error)
            self._file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedStep:
    """A step of the run, from the newest attempt of which all ranks completed it."""

    step: int
    generation: int
    world: int
    positions: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Which samples a run used.

    Attributes:
        header: What the order should be.
        steps: The completed steps, in order.
        step_times: When ranks completed steps, in order and in Unix seconds; also steps that were computed again
            later.
        num_redone: How often a step was computed again.
    """

    header: AuditHeader
    steps: tuple[AuditedStep, ...]
    step_times: tuple[float, ...]
    num_redone: int

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a step, in seconds, in or around a period.

        A gap counts if it overlaps with the time between `begin` and `end` (Unix seconds).
        """
        gaps = [later - earlier for earlier, later in pairwise(self.step_times) if later > begin and earlier < end]
        return max(gaps, default=0.0)

    def problems(self, total_steps: int | None = None, *, order: DataOrder | None = None) -> list[str]:
        """Compare the run with an uninterrupted one.

        Args:
            total_steps: Steps that the run should have. None: as many as it has.
            order: What the order should be. None: the session's own, by the header.

        Returns:
            Sentences on differences; empty if there are none.
        """
        header = self.header
        if order is None and header.order != Permutation.KIND:
            return [f"the samples can't be checked: pass the run's order ({header.order}) to problems(order=...)"]
        order = order or Permutation(num_samples=header.num_samples, seed=header.seed, shuffle=header.shuffle)
        batches = Batches(order, header.global_batch, by_epoch=header.loop == "epochs")
        last = total_steps if total_steps is not None else max((step.step for step in self.steps), default=0)
        found = {step.step: step for step in self.steps}
        missing = [step for step in range(1, last + 1) if step not in found]
        problems = []
        if missing:
            problems = [f"{len(missing)} steps were completed by no generation, the first of them step {missing[0]}"]
        for number, step in sorted(found.items()):
            wanted = batches.at(number - 1).positions
            if list(step.positions) != list(wanted):
                problems.append(f"step {number} used other positions than {wanted.start} to {wanted.stop - 1}")
            elif list(step.samples) != order.samples(wanted).tolist():
                problems.append(f"step {number} used other samples than an uninterrupted run")
        return problems


def read_audit(folder: Path) -> Audit:
    """Merge the files of all ranks and generations. Raises ValueError if there are none."""
    records: list[AuditRecord] = []
    headers: list[AuditHeader] = []
    for path in sorted(folder.glob("audit-*.jsonl")):
        for line in path.read_text().splitlines():
            _parse(line, headers, records)
    if not headers:
        raise ValueError(f"{folder} holds no audit files; run the job with SPOTTRAIN_AUDIT_DIR set to it")
    if any(header != headers[0] for header in headers):
        raise ValueError(f"the audit files in {folder} are of different runs; use an empty folder for each run")
    return _merge(headers[0], records)


def _parse(line: str, headers: list[AuditHeader], records: list[AuditRecord]) -> None:
    try:
        content = json.loads(line)
        if "step" in content:
            records.append(AuditRecord.model_validate(content))
        else:
            headers.append(AuditHeader.model_validate(content))
    except (json.JSONDecodeError, ValidationError):
        # The last line of a rank that was killed while it wrote. That step was not completed.
        return


def _merge(header: AuditHeader, records: Sequence[AuditRecord]) -> Audit:
    by_step: dict[int, dict[tuple[int, str], list[AuditRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_step[record.step][record.generation, record.attempt].append(record)
    steps = [
        _audited(sorted(newest, key=lambda record: record.rank))
        for _, of_step in sorted(by_step.items())
        for newest in [_newest_complete(of_step.values())]
        if newest is not None
    ]
    redone = sum(len(of_step) - 1 for of_step in by_step.values())
    times = sorted(record.at for record in records)
    return Audit(header=header, steps=tuple(steps), step_times=tuple(times), num_redone=redone)


def _newest_complete(attempts: Iterable[list[AuditRecord]]) -> list[AuditRecord] | None:
    complete = [
        records for records in attempts if {record.rank for record in records} == set(range(records[0].world))
    ]
    # By time: the generations of a later job have lower numbers than those of the job before it.
    return max(complete, key=lambda records: max(record.at for record in records), default=None)


def _audited(records: Sequence[AuditRecord]) -> AuditedStep:
    return AuditedStep(
        step=records[0].step,
        generation=records[0].generation,
        world=records[0].world,
        positions=tuple(position for record in records for position in record.positions),
        samples=tuple(sample for record in records for sample in record.samples),
    )
