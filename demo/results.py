"""What the incidents cost, and whether all went as promised."""

from __future__ import annotations

import time

from rich.table import Table

from demo.incidents import Course, Happened, new_transitions
from spottrain.data.audit import Audit
from spottrain_api.v1alpha1.status import Phase, Transition
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.report import transition_row
from spottrain_runtime.wording import counted


def result_table(course: Course, job: JobSnapshot, audit: Audit) -> Table:
    """Build a table with the cost of each incident.

    The job's status has the cost of a change of membership. That of the operator's loss is in the ranks' records."""
    table = Table("What happened", "Steps redone", "Seconds without a step", "World size", title="The demo")
    for happened in course.happened:
        transitions = _transitions_of(happened, job)
        for transition in transitions:
            _, _, redone, gap, world = transition_row(transition)
            table.add_row(happened.incident.title, redone, gap, world)
        if not transitions:
            world = str(happened.before.status.generation.world_size) if happened.before.status.generation else "–"
            longest = audit.longest_gap(happened.started_at, happened.ended_at or time.time())
            table.add_row(happened.incident.title, "0", f"{longest:.1f}", f"{world} → {world}")
    return table


def _transitions_of(happened: Happened, job: JobSnapshot) -> list[Transition]:
    until = happened.after or job
    known = {(item.generation, item.at) for item in new_transitions(happened.before, until)}
    return [item for item in job.status.transitions if (item.generation, item.at) in known]


def verdict(course: Course, job: JobSnapshot, audit: Audit) -> list[str]:
    """List a sentence for each broken promise; none if all went as promised."""
    problems = []
    if job.status.phase is not Phase.SUCCEEDED:
        problems.append(f"The job ended {job.status.phase.value}: {job.status.message}")
    problems += [f"This did not happen: {incident.title}." for incident in course.to_come]
    problems += [f"This did not end: {item.incident.title}." for item in course.happened if item.after is None]
    for transition in job.status.transitions:
        if transition.with_notice and transition.steps_redone != 0:
            redone = transition.steps_redone
            cost = "an unknown number of steps" if redone is None else counted(redone, "step")
            problems.append(f"A preemption with notice cost {cost}: {transition.message}")
    problems += [f"Order of samples: {problem}." for problem in audit.problems(job.status.progress.total_steps)]
    return problems
