"""How a job reacts to lost nodes.

After a notice the generation drains in time. Without a notice, the other members stop at once.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import STILL_IN, MemberFacts, MemberState, members_of
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.ending import request_end
from spottrain_operator.core.timing import after


def handle_losses(situation: Situation, draft: Draft) -> Draft:
    """Stop the generation if a member is gone.

    The others hang in their collectives until they are stopped.
    """
    generation = draft.running
    if generation is None:
        return draft
    members = members_of(situation, generation)
    lost = [m for m in members if m.state is MemberState.LOST]
    drained = generation.state is GenerationState.DRAINING and not any(m.state in STILL_IN for m in members)
    if not lost or drained:
        return draft
    message = "; ".join(m.message for m in lost)
    return request_end(situation, draft, members, Cause.NODE_LOST, message, at_once=True)


def handle_notices(situation: Situation, draft: Draft) -> Draft:
    """Drain the generation if a member will be gone soon.

    Its agent has the notice, and may drain already.
    """
    generation = draft.running
    if generation is None or generation.state is GenerationState.STOPPING:
        return draft
    members = members_of(situation, generation)
    losses = [m.facts.coming_loss for m in members if m.facts is not None and m.facts.coming_loss is not None]
    loses_member = any(
        m.state in STILL_IN and m.facts is not None and m.facts.coming_loss is not None for m in members
    )
    if not loses_member and not any(_drains_by_itself(m) for m in members):
        return draft
    message = "; ".join(dict.fromkeys(loss.message for loss in losses)) or "an agent received a notice for its node"
    deadline = min((loss.deadline for loss in losses), default=after(situation.now, situation.timing.unknown_lead))
    if generation.state is GenerationState.DRAINING and not loses_member:
        return draft  # it drains because it was asked to
    return request_end(
        situation,
        draft,
        members,
        Cause.PREEMPTED,
        message,
        deadline=_not_past(deadline, situation),
        at_once=any(m.state is MemberState.STOPPED for m in members),
    )


def _drains_by_itself(m: MemberFacts) -> bool:
    """Whether the member's agent acts on a notice.

    Nothing else makes an agent drain by itself.
    """
    if m.state in (MemberState.DRAINED, MemberState.STOPPED):
        return True
    return m.state is MemberState.RUNNING and m.progress is not None and m.progress.drain_seen_at is not None


def _not_past(deadline: datetime, situation: Situation) -> datetime:
    """The deadline of a drain.

    A notice's deadline that has passed counts as unknown, as the node is still there.
    """
    return deadline if deadline > situation.now else after(situation.now, situation.timing.unknown_lead)
