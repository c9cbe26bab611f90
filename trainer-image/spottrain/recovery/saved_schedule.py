"""The state of a schedule of learning rates in a commit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.recovery.script_parts import load_part

# Parts of a schedule's state that say where it is.
_POSITION = ("last_epoch", "_step_count")


@dataclass(frozen=True, slots=True)
class SavedSchedule:
    """A schedule, and what a commit holds of it: `{"class": "LambdaLR", "state": {...}}`."""

    scheduler: LRScheduler

    def state(self) -> dict[str, Any]:
        return {"class": type(self.scheduler).__name__, "state": schedule_state(self.scheduler)}

    def load(self, saved: dict[str, Any], rates: Sequence[Any], step: int) -> None:
        """Continue where the commit's schedule was; its optimizer is loaded.

        A schedule of another class has numbers of its own, and takes over the step and the rates that it scales.

        Args:
            saved: What the commit holds.
            rates: The learning rates of the optimizer's groups that the script gave.
            step: Step of the commit.

        Raises:
            CheckpointMismatch: The schedule can't continue from there.
        """
        scheduler, state, before = self.scheduler, saved["state"], self._other_class(saved)
        # Others, such as a CyclicLR in a sequence, have base rates of their own.
        scale_groups = [
            each for each in _simple_schedules(scheduler) if as_plain(getattr(each, "base_lrs", None)) == tuple(rates)
        ]
        if before is None:
            state = _with_tensors(state, scheduler.state_dict())
            load_part("the schedule", scheduler, state, step, advice="Set the schedule back")
            for each in _simple_schedules(scheduler):
                groups = each.optimizer.param_groups
                if each in scale_groups and all("initial_lr" in group for group in groups):
                    # The optimizer's groups were loaded by their parameters: the script may form others.
                    each.base_lrs = [group["initial_lr"] for group in groups]
                numbers = {len(getattr(each, name, groups)) for name in ("base_lrs", "max_lrs")}
                if other := numbers - {len(groups)}:
                    raise CheckpointMismatch(
                        f"The checkpoint at step {step} has a {type(each).__name__} for {other.pop()} parameter "
                        f"groups, and the script forms {len(groups)}. Set the groups back, or create a new job with "
                        "a different checkpoint.uri."
                    )
            return
        has_step = "last_epoch" in state  # not a ChainedScheduler's
        if not has_step or hasattr(scheduler, "_schedulers"):  # made of others, with steps of their own
            advice = "Use a LambdaLR, such as those of spottrain.schedules, set" if has_step else "Set"
            raise CheckpointMismatch(
                f"The checkpoint at step {step} was made with the schedule {before}, from which the script's "
                f"{type(scheduler).__name__} can't continue. {advice} the schedule back, or create a new job with a "
                "different checkpoint.uri."
            )
        vars(scheduler).update({name: state[name] for name in _POSITION if name in state})
        if scheduler in scale_groups:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]

    def change(self, saved: dict[str, Any] | None, step: int) -> str | None:
        """A sentence about a difference with which the run can continue."""
        if saved is None:
            return (
                f"The checkpoint at step {step} was made without a schedule, and the script's schedule starts at its "
                "own step 0. Make it for the steps that are left, or create a new job with a different "
                "checkpoint.uri."
            )
        if (before := self._other_class(saved)) is not None:
            return (
                f"The checkpoint at step {step} was made with the schedule {before}, and the script's "
                f"{type(self.scheduler).__name__} continues from there. The first step has the learning rate of the "
                "checkpoint. A LambdaLR then follows its function; most others go on from that rate."
            )
        return None

    def rates(self) -> list[float]:
        """The learning rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set what `rates` returned."""
        for group, rate in zip(self.scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _other_class(self, saved: dict[str, Any]) -> str | None:
        """The class of the commit's schedule, if it is not the script's."""
        before: str = saved["class"]
        return before if before != type(self.scheduler).__name__ else None


def schedule_state(scheduler: LRScheduler) -> dict[str, Any]:
    """A schedule's state in plain values.

    If learning rates are tensors, parts of the schedule's own state are, too.
    """
    state: dict[str, Any] = _with_numbers(scheduler.state_dict())
    return state


def as_plain(value: Any) -> Any:
    """An option with numbers instead of tensors, and tuples instead of lists."""
    if isinstance(value, list | tuple):
        return tuple(map(as_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _simple_schedules(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """The schedule, or those of which it consists."""
    if hasattr(scheduler, "_schedulers"):
        for each in scheduler._schedulers:
            yield from _simple_schedules(each)
    else:
        yield scheduler


def _with_numbers(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.item()
    if isinstance(state, dict):
        return {key: _with_numbers(value) for key, value in state.items()}
    return [_with_numbers(value) for value in state] if isinstance(state, list) else state


def _with_tensors(saved: Any, now: Any) -> Any:
    """Undo `_with_numbers`.

    Values that are tensors in the state of the same schedule `now` become tensors, and dicts get their class from it.
    A rate computed from numbers would round differently.
    """
    if isinstance(now, torch.Tensor):
        return torch.tensor(saved, dtype=now.dtype, device=now.device)
    if isinstance(saved, dict) and isinstance(now, dict):
        restored = copy.copy(now)  # of the same class: MultiStepLR has a Counter, whose methods SequentialLR needs
        restored.clear()
        restored.update({key: _with_tensors(value, now.get(key)) for key, value in saved.items()})
        return restored
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_with_tensors(*pair) for pair in zip(saved, now, strict=True)]
    return saved
