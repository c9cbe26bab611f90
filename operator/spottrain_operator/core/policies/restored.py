"""A status that has gone back, as after a restore of etcd from a backup."""

from __future__ import annotations

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import members_of
from spottrain_operator.core.facts.situation import BUSY, Situation
from spottrain_operator.core.policies.ending import request_end


def handle_restored_status(situation: Situation, draft: Draft) -> Draft:
    """Drain the generation that pods run, if the status knows an earlier one only.

    The status takes on its number, so that the agents obey. Its members are not known, but for those that the earlier
    one had, too, and that have reported. That is enough: ranks agree on the step after which all of them stop.
    """
    earlier = draft.status.generation
    if earlier is None:
        return draft
    reports = situation.observed.reports
    known = {m.pod_uid: reports[m.pod_uid].report for m in earlier.members if m.pod_uid in reports}
    newest = max((report.generation for report in known.values()), default=0)
    if newest <= earlier.number:
        return draft
    if earlier.state is GenerationState.ENDED and not any(report.phase in BUSY for report in known.values()):
        return draft
    draft = draft.update_generation(
        number=newest,
        state=GenerationState.ACTIVE,
        members=tuple(m for m in earlier.members if m.pod_uid in known and known[m.pod_uid].generation == newest),
        started_at=situation.now,
        first_step_at=None,
        reason=None,
        requested_at=None,
        deadline=None,
        ended_at=None,
    )
    generation = draft.running
    assert generation is not None
    message = f"the job's status went back to generation {earlier.number}, as after a restore from a backup"
    return request_end(situation, draft, members_of(situation, generation), Cause.STATUS_RESTORED, message)
