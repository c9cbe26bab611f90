"""A plan in progress: what the policies so far decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from spottrain_api.contract.conditions import ConditionType
from spottrain_api.v1alpha1.status import FINISHED_PHASES, Condition, GenerationStatus, TrainingJobStatus
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import Action, DeletePod, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The status to write, the actions to take and the events to record, so far.

    Attributes:
        records: Whether what changes all the time goes to the status. It does now and then, and whenever something
            else changes.
    """

    status: TrainingJobStatus
    records: bool = False
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def running(self) -> GenerationStatus | None:
        """The newest generation, unless it has ended."""
        return self.status.running

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.status.phase in FINISHED_PHASES

    @property
    def leaving(self) -> frozenset[str]:
        """Uids of the pods that are deleted."""
        return frozenset(action.uid for action in self.actions if isinstance(action, DeletePod))

    def update(self, **changes: Any) -> Draft:
        """With these fields of the status replaced."""
        return replace(self, status=self.status.model_copy(update=changes))

    def update_generation(self, **changes: Any) -> Draft:
        """With these fields of the newest generation replaced."""
        generation = self.status.generation
        return self if generation is None else self.update(generation=generation.model_copy(update=changes))

    def act(self, *actions: Action) -> Draft:
        return replace(self, actions=(*self.actions, *actions))

    def record(self, reason: StrEnum, message: str, *, warning: bool = False) -> Draft:
        event = Event(type="Warning" if warning else "Normal", reason=reason.value, message=message)
        return replace(self, events=(*self.events, event))

    def condition(self, kind: ConditionType, holds: bool, reason: StrEnum, message: str, now: datetime) -> Draft:
        """With the condition `kind`, whose transition time changes only with its truth."""
        truth = "True" if holds else "False"
        old = self.status.condition(kind)
        if old is not None and (old.status, old.reason, old.message) == (truth, reason.value, message):
            return self
        since = now if old is None or old.status != truth else old.last_transition_time
        new = Condition(
            type=kind.value, status=truth, reason=reason.value, message=message, last_transition_time=since
        )
        others = tuple(c for c in self.status.conditions if c.type != kind)
        return self.update(conditions=tuple(sorted((*others, new), key=lambda c: c.type)))


Policy = Callable[[Situation, Draft], Draft]
