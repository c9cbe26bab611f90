"""Time that `plan` takes for 1,000 jobs of 8 members.

Run: python -m benchmarks.bench_plan

The jobs train: each has a running generation, a report of each agent, and progress to record, so that no policy is
skipped. Observing and writing aren't measured, because they depend on the API server.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime

from simulation.world import World
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.model import Observed
from spottrain_operator.core.plan import plan
from world.jobs import spec_of

NUM_JOBS = 1000
NUM_MEMBERS = 8


def training_job() -> tuple[Observed, datetime]:
    """A job that has trained for a minute, and the present time."""
    world = World(spec_of(nodes={"min": 2, "max": NUM_MEMBERS}), total_steps=10_000)
    for number in range(NUM_MEMBERS):
        world.add_node(CapacityType.ON_DEMAND if number < 2 else CapacityType.SPOT)
    world.run(60)
    observed = world.observe()
    unrecorded = observed.job.status.model_copy(update={"accounted_at": None})
    return replace(observed, job=replace(observed.job, status=unrecorded)), world.now


def main() -> None:
    job, now = training_job()
    jobs = [
        replace(job, job=replace(job.job, name=f"job{number}", uid=f"{number:08d}")) for number in range(NUM_JOBS)
    ]
    begin = time.perf_counter()
    plans = [plan(each, now) for each in jobs]
    elapsed = time.perf_counter() - begin
    running = sum(each.status.phase is Phase.RUNNING for each in plans)
    print(f"{NUM_JOBS} jobs of {NUM_MEMBERS} members, {running} running: planned in {elapsed:.3f} s")


if __name__ == "__main__":
    main()
