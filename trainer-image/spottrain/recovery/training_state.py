"""The state of a run: what a commit holds, and what a resume restores."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint.errors import CheckpointError, CheckpointMismatch, RanksDiffer, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.data import random_state
from spottrain.engines.engine import Engine
from spottrain.recovery.script_parts import (
    PREFIX,
    Stateful,
    load_part,
    load_parts,
    room_for,
    states_of,
    unfit_parts,
    without,
)
from spottrain_api.contract.reports import StrategyChoice

# Key under which a commit holds the strategy that `strategy: auto` chose.
STRATEGY = "strategy"
# Name of the part of the run that is the guard of `stability`.
STABILITY = "stability"
# Parts of a schedule's state that say where it is.
_POSITION = ("last_epoch", "_step_count")
# Options of an optimizer's groups that scripts set and commits hold. Schedules keep the rate as initial_lr.
_OPTIONS = ("lr", "weight_decay", "betas", "momentum", "eps")

Options = Sequence[Mapping[str, Any]]
"""Options of each group of an optimizer: numbers and tuples of numbers. Some optimizers have None for a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything that makes a resumed run the same run.

    Attributes:
        engine: Holds model and optimizer.
        optimizer: The optimizer that schedules set; its groups hold the options.
        scheduler: The schedule of learning rates; None if there is none.
        identity: What must not differ between the run that saved and the run that resumes, such as the seed and the
            number of samples.
        model_config: Configuration of a Hugging Face model, for exports.
        peft: Adapters of a PEFT model, for exports; on rank 0.
        engine_name: "ddp", "fsdp" or "deepspeed"; None if a framework has spread the model.
        strategy: What `strategy: auto` chose.
        total_steps: Steps of the whole run, once the script has said how many.
        stateful: Further parts: rank 0's state is saved. A part that the checkpoint does not hold starts afresh.
        records: Names of the parts that only rank 0 has right, such as the times that a framework logs. Others are
            the same on all ranks.
    """

    engine: Engine
    optimizer: Optimizer
    scheduler: LRScheduler | None
    identity: dict[str, Any]
    model_config: dict[str, Any] | None = None
    peft: dict[str, Any] | None = None
    engine_name: str | None = None
    strategy: StrategyChoice | None = None
    total_steps: int | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    records: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Any]:
        """Model, optimizer and the script's parts in the form that DCP expects, with their shards."""
        return {**self.engine.state(), **states_of(self._parts())}

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state to load a commit into: see `Engine.room`."""
        return {**self.engine.room(saved), **room_for(self._parts(), saved)}

    def _parts(self) -> dict[str, Stateful]:
        """The parts that are the same on all ranks."""
        return {name: part for name, part in self.stateful.items() if name not in self.records}

    def frozen(self) -> set[str]:
        """Names of the tensors that are not trained, as in the checkpointer."""
        return {f"model.{name}" for name in self.engine.frozen()}

    def extra(self) -> dict[str, Any]:
        """What a commit holds besides tensors: plain values, the same on all ranks."""
        extra = {
            "identity": self.identity,
            "scheduler": schedule_state(self.scheduler) if self.scheduler is not None else None,
            "scheduler_class": type(self.scheduler).__name__ if self.scheduler is not None else None,
            "model_config": self.model_config,
            "engine": self.engine_name,
            "total_steps": self.total_steps,
            "stateful": list(self.stateful),
            "records": {name: self.stateful[name].state_dict() for name in self.records},
        }
        if self.peft is not None:
            extra["peft"] = self.peft
        if self.strategy is not None:
            extra[STRATEGY] = self.strategy.model_dump()
        return extra

    def alike(self) -> list[tuple[str, ...]]:
        """Where `extra` has values that are the same on all ranks."""
        return [("identity",), ("scheduler",), ("total_steps",)]

    def restore(self, loaded: Loaded, scripts: Options, *, seed: int, rank: int) -> None:
        """Restore a commit, and the random numbers. A collective.

        Args:
            loaded: The commit, loaded into the engine's room.
            scripts: What `options` returned before the checkpoint was loaded.
            seed: Seed of the run.
            rank: Number of this rank.

        Raises:
            CheckpointMismatch: The schedule or a part of `stateful` does not understand its saved state.
        """
        self.engine.load_state(loaded.state)
        if self.scheduler is not None and loaded.extra["scheduler"] is not None:
            self._load_schedule(self.scheduler, loaded, scripts)
        load_parts(self._parts(), loaded.state, loaded.step)
        for name, saved in loaded.extra["records"].items():
            if name in self.records:
                load_part(name, self.stateful[name], saved, loaded.step, advice="Use the framework's version before")
        if loaded.rank_state is not None:
            random_state.restore(loaded.rank_state)
        else:
            random_state.seed_everything(seed, step=loaded.step, rank=rank)

    def _load_schedule(self, scheduler: LRScheduler, loaded: Loaded, scripts: Options) -> None:
        """Continue the schedule where the commit's was; the optimizer is loaded.

        A schedule of another class has numbers of its own, and takes over the step and the rates that it scales.
        """
        initial = tuple(group.get("lr") for group in scripts)
        # Others, such as a CyclicLR in a sequence, have base rates of their own.
        scale_groups = [
            each for each in _simple_schedules(scheduler) if _plain(getattr(each, "base_lrs", None)) == initial
        ]
        saved = loaded.extra["scheduler"]
        before = self._other_schedule(loaded)
        if before is None:
            saved = _with_tensors(saved, scheduler.state_dict())
            load_part("the schedule", scheduler, saved, loaded.step, advice="Set the schedule back")
            for each in _simple_schedules(scheduler):
                groups = each.optimizer.param_groups
                if each in scale_groups and all("initial_lr" in group for group in groups):
                    # The optimizer's groups were loaded by their parameters: the script may form others.
                    each.base_lrs = [group["initial_lr"] for group in groups]
                numbers = {len(getattr(each, name, groups)) for name in ("base_lrs", "max_lrs")}
                if other := numbers - {len(groups)}:
                    raise CheckpointMismatch(
                        f"The checkpoint at step {loaded.step} has a {type(each).__name__} for {other.pop()} "
                        f"parameter groups, and the script forms {len(groups)}. Set the groups back, or create a new "
                        "job with a different checkpoint.uri."
                    )
            return
        has_step = "last_epoch" in saved  # not a ChainedScheduler's
        if not has_step or hasattr(scheduler, "_schedulers"):  # made of others, with steps of their own
            advice = "Use a LambdaLR, such as those of spottrain.schedules, set" if has_step else "Set"
            raise CheckpointMismatch(
                f"The checkpoint at step {loaded.step} was made with the schedule {before}, from which the script's "
                f"{type(scheduler).__name__} can't continue. {advice} the schedule back, or create a new job with a "
                "different checkpoint.uri."
            )
        vars(scheduler).update({name: saved[name] for name in _POSITION if name in saved})
        if scheduler in scale_groups:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]

    def _other_schedule(self, loaded: Loaded) -> str | None:
        """The class of the commit's schedule, if it is not the script's."""
        before: str | None = loaded.extra["scheduler_class"]
        return before if self.scheduler is not None and before != type(self.scheduler).__name__ else None

    def options(self) -> Options:
        """The optimizer's options as they are now, before what a schedule makes of them."""
        return [
            {name: _plain(group.get(f"initial_{name}", group[name])) for name in _OPTIONS if name in group}
            for group in self.optimizer.param_groups
        ]

    def learning_rates(self) -> list[float]:
        """Learning rates of the optimizer's groups; empty if no schedule sets them."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups] if self.scheduler else []

    def set_learning_rates(self, rates: list[float]) -> None:
        """Set what `learning_rates` returned."""
        for group, rate in zip(self.scheduler.optimizer.param_groups if self.scheduler else [], rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def check(self, extra: dict[str, Any], step: int) -> None:
        """Raises CheckpointMismatch if the saved run had a different identity."""
        before = extra["identity"]
        differing = [name for name, now in self.identity.items() if before.get(name) != now]
        if differing:
            saved, here = (
                " and ".join(f"{name} {values.get(name)}" for name in differing) for values in (before, self.identity)
            )
            raise CheckpointMismatch(
                f"The checkpoint at step {step} was made with {saved}, and this run has {here}. "
                f"Set {'it' if len(differing) == 1 else 'them'} back, or create a new job with a different "
                "checkpoint.uri."
            )

    def changes(self, loaded: Loaded) -> Iterator[str]:
        """Sentences about differences from the run that saved. This run can continue with them."""
        before, now = loaded.extra["engine"], self.engine_name
        if None not in (before, now) and before != now:
            yield (
                f"The checkpoint at step {loaded.step} was made with the strategy {before}, and training continues "
                f"from it with {now}: the weights and the order of the samples are the same, the rounding is not."
            )
        length, new_length = loaded.extra["total_steps"], self.total_steps
        if self.scheduler is not None and None not in (length, new_length) and length != new_length:
            yield (
                f"The checkpoint at step {loaded.step} is of a run of {length} steps, and this run has {new_length}. "
                "Learning rates of spottrain.schedules follow the new length from the next step on; other schedules "
                "may keep the old one."
            )
        if self.scheduler is not None and loaded.extra["scheduler"] is None:
            yield (
                f"The checkpoint at step {loaded.step} was made without a schedule, and the script's schedule starts "
                "at its own step 0. Make it for the steps that are left, or create a new job with a different "
                "checkpoint.uri."
            )
        if (before := self._other_schedule(loaded)) is not None:
            yield (
                f"The checkpoint at step {loaded.step} was made with the schedule {before}, and the script's "
                f"{type(self.scheduler).__name__} continues from there. The first step has the learning rate of the "
                "checkpoint. A LambdaLR then follows its function; most others go on from that rate."
            )
        new = self.stateful.keys() - set(loaded.extra["stateful"]) - {STABILITY}
        if new:
            yield (
                f"The checkpoint at step {loaded.step} holds no state of {', '.join(sorted(new))} (stateful), which "
                "starts afresh. If the script has only renamed it, set the name back."
            )
        if loaded.replaced:
            first, *more = (name.removeprefix("model.") for name in loaded.replaced)
            which = f"{first} and {len(more)} more" if more else first
            yield (
                f"Weights that the script doesn't train differ from those in the checkpoint at step {loaded.step}, "
                f"which replace them: {which}. To train with the script's own, create a new job with a "
                "different checkpoint.uri."
            )

    def unused_options(self, scripts: Options, step: int) -> Iterator[str]:
        """A sentence about the optimizer's options that a commit has replaced.

        The script gave the optimizer these options.
        """
        differing: dict[str, str] = {}
        for now, script in zip(self.options(), scripts, strict=True):
            for name in script.keys() & now.keys():
                if now[name] != script[name]:
                    differing.setdefault(name, f"{name} {now[name]} (in the script: {script[name]})")
        if differing:
            which = ", ".join(differing[name] for name in _OPTIONS if name in differing)
            yield (
                f"The optimizer continues with the options of the checkpoint at step {step}, which differ from the "
                f"script's: {which}. To change options of a run, see 'Change the learning rate' in "
                "docs/how-to/resume-fork-export.md."
            )


def what_fits(
    tensors: dict[str, Any], extra: dict[str, Any], error: CheckpointError
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """What a commit can hold of a state after a save ended with `error`.

    Returns:
        The tensors, without the parts of `stateful` and the optimizer's states of parameters that it can't hold; the
        values besides, without such records; and what that makes of the commit, None if nothing helps.
    """
    if isinstance(error, RanksDiffer):
        is_of_script = error.name.startswith(PREFIX)
        return tensors, extra, f"holds rank 0's {error.name} for all ranks" if is_of_script else None
    records = {name: state for name, state in extra["records"].items() if codec.is_storable(state)}
    states = tensors.get("optimizer", {}).get("state", {})
    fitting = {name: state for name, state in states.items() if _is_storable(state)}
    parts = [*unfit_parts(tensors), *(extra["records"].keys() - records.keys())]
    left_out = [f"the state of {name} (stateful)" for name in parts]
    left_out += [f"the optimizer's state of {name}" for name in states if name not in fitting]
    kept = {**tensors, "optimizer": {**tensors["optimizer"], "state": fitting}} if states else tensors
    change = f"is without {', '.join(left_out)}, which a resume would start afresh" if left_out else None
    names = [name for name in extra["stateful"] if name not in parts]
    return without(kept, parts), {**extra, "records": records, "stateful": names}, change


def _is_storable(state: dict[str, Any]) -> bool:
    try:
        codec.split(state)
    except UnsupportedState:
        return False
    return True


def _plain(value: Any) -> Any:
    """An option with numbers instead of tensors, and tuples instead of lists."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def schedule_state(scheduler: LRScheduler) -> dict[str, Any]:
    """A schedule's state in plain values.

    If learning rates are tensors, parts of the schedule's own state are, too.
    """
    state: dict[str, Any] = _with_numbers(scheduler.state_dict())
    return state


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


def model_config(model: nn.Module) -> dict[str, Any] | None:
    """Configuration of a Hugging Face model (`model.config`); None for others.

    It is as in the model's config.json.
    """
    as_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if as_json is None:
        return None
    config: dict[str, Any] = json.loads(as_json())
    return config
