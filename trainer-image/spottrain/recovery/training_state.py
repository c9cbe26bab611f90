"""The state of a run: what a commit holds, and what a resume restores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint.errors import CheckpointError, CheckpointMismatch, RanksDiffer, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.described import holds_tensors
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.data import random_state
from spottrain.engines.engine import SavedState
from spottrain.engines.inside import inside
from spottrain.recovery.by_rank import RankPart, dropped, load_rank_parts, rank_states_of
from spottrain.recovery.option_history import OptionHistory, Options, options_of
from spottrain.recovery.saved_schedule import SavedSchedule
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
# Name of the one schedule of a loop that is the library's or a framework's.
SCHEDULER = "scheduler"
# Name of the part of the run that is the guard of `stability`.
STABILITY = "stability"
# Name of the part of the run that is the place in the script's own order.
ORDER = "order"
# Name of each rank's part of the run that is where its streams can be read on from.
STREAMS = "data streams"
# Parts of a run's identity that commits of earlier versions lack, as they were.
_IDENTITY_BEFORE = {"order": "permutation", "loop": "steps"}


class CommitContents(Protocol):
    """What a commit holds."""

    def tensors(self) -> dict[str, Any]:
        """Models, optimizers and the script's parts in the form that DCP expects, with their shards."""
        ...

    def frozen(self) -> set[str]:
        """Names of the tensors that are not trained, as in the checkpointer."""
        ...

    def extra(self) -> dict[str, Any]:
        """What a commit holds besides tensors: plain values, the same on all ranks."""
        ...

    def alike(self) -> list[tuple[str, ...]]:
        """Where `extra` has values that are the same on all ranks."""
        ...

    def rank_state(self) -> dict[str, Any]:
        """Plain values of this rank's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything that makes a resumed run the same run. Implements CommitContents.

    Attributes:
        models: Holds models and optimizers.
        optimizers: The optimizers that schedules set, by their keys in the state; their groups hold the options.
        schedulers: The schedules of learning rates, by name.
        identity: What must not differ between the run that saved and the run that resumes, such as the seed and the
            number of samples. Known once the loop has begun.
        model_config: Configuration of a Hugging Face model, for exports.
        peft: Adapters of a PEFT model, for exports; on rank 0.
        engine_name: "ddp", "fsdp" or "deepspeed"; None if a framework has spread the model.
        strategy: What `strategy: auto` chose.
        total_steps: Steps of the whole run, once the script has said how many.
        stateful: Further parts: rank 0's state is saved. A part that the checkpoint does not hold starts afresh.
        records: Names of the parts that only rank 0 has right, such as the times that a framework logs. Others are
            the same on all ranks.
        by_rank: Parts of which each rank has a state of its own.
        build: How the script's model was built (spottrain.loop.build); None if that isn't known.
        blank: Names of the parameters that were built without values, because a commit has them.
        history: What became of the optimizers' options.
    """

    models: SavedState
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, LRScheduler]
    identity: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] | None = None
    peft: dict[str, Any] | None = None
    engine_name: str | None = None
    strategy: StrategyChoice | None = None
    total_steps: int | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    records: frozenset[str] = frozenset()
    by_rank: Mapping[str, RankPart] = field(default_factory=dict)
    build: Mapping[str, Any] | None = None
    blank: frozenset[str] = frozenset()
    history: OptionHistory = field(default_factory=OptionHistory)

    def tensors(self) -> dict[str, Any]:
        """Model, optimizer and the script's parts in the form that DCP expects, with their shards."""
        return {**self.models.state(), **self.parts()}

    def parts(self) -> dict[str, Any]:
        """The script's parts that are the same on all ranks."""
        return states_of(self._parts())

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state to load a commit into: see `SavedState.room`."""
        room = {**self.models.room(saved), **room_for(self._parts(), saved)}
        left = (key for key in saved if key not in room and not key.startswith(PREFIX) and _is_trained(saved[key]))
        if (key := next(left, None)) is not None:
            raise CheckpointMismatch(
                f"The checkpoint holds the model or optimizer {key!r}, which the script doesn't have. Give it back "
                "under this name, or create a new job with a different checkpoint.uri."
            )
        return room

    def _parts(self) -> dict[str, Stateful]:
        """The parts that are the same on all ranks."""
        return {name: part for name, part in self.stateful.items() if name not in self.records}

    def frozen(self) -> set[str]:
        """Names of the tensors that are not trained, as in the checkpointer."""
        return self.models.frozen()

    def extra(self) -> dict[str, Any]:
        """What a commit holds besides tensors: plain values, the same on all ranks."""
        extra = {
            "identity": self.identity,
            "optimizers": list(self.optimizers),
            "schedulers": {name: each.state() for name, each in self._schedules().items()},
            "model_config": self.model_config,
            "engine": self.engine_name,
            "total_steps": self.total_steps,
            "options": self.history.record(self.options()),
            "stateful": list(self.stateful),
            "records": {name: self.stateful[name].state_dict() for name in self.records},
        }
        if self.build is not None:
            extra["build"] = dict(self.build)
        if self.peft is not None:
            extra["peft"] = self.peft
        if self.strategy is not None:
            extra[STRATEGY] = self.strategy.model_dump()
        return extra

    def alike(self) -> list[tuple[str, ...]]:
        """Where `extra` has values that are the same on all ranks."""
        return [("identity",), ("schedulers",), ("total_steps",)]

    def restore(self, loaded: Loaded, *, seed: int, rank: int) -> None:
        """Restore a commit, and the random numbers. A collective.

        Args:
            loaded: The commit, loaded into the engine's room.
            seed: Seed of the run.
            rank: Number of this rank.

        Raises:
            CheckpointMismatch: The schedule or a part of `stateful` does not understand its saved state.
        """
        self.models.load_state(loaded.state)
        for name, schedule in self._schedules().items():
            if (saved := loaded.extra["schedulers"].get(name)) is not None:
                schedule.load(saved, self._rates(schedule, self.history.script), loaded.step)
        load_parts(self._parts(), loaded.state, loaded.step)
        for name, saved in loaded.extra["records"].items():
            if name in self.records:
                load_part(name, self.stateful[name], saved, loaded.step, advice="Use the framework's version before")
        self.history.resumed(self.options(), loaded.extra.get("options", {}))
        load_rank_parts(self.by_rank, loaded)
        if loaded.rank_state is not None:
            random_state.restore(loaded.rank_state["random"])
        else:
            random_state.seed_everything(seed, step=loaded.step, rank=rank)

    def ranks(self, num_saved: int) -> range:
        """The ranks whose own state this one needs of a commit, besides what it has saved itself."""
        return range(num_saved if any(each.needs_every_rank(num_saved) for each in self.by_rank.values()) else 0)

    def rank_state(self) -> dict[str, Any]:
        """Plain values of this rank's own: its random numbers, and its parts."""
        return {"random": random_state.capture(), "parts": rank_states_of(self.by_rank)}

    def _schedules(self) -> dict[str, SavedSchedule]:
        return {name: SavedSchedule(each) for name, each in self.schedulers.items()}

    def _rates(self, schedule: SavedSchedule, scripts: Options) -> list[Any]:
        """The learning rates that the script gave to the schedule's optimizer."""
        of = inside(schedule.scheduler.optimizer)
        return [
            group.get("lr") for name, each in self.optimizers.items() if each is of for group in scripts.get(name, ())
        ]

    def options(self) -> Options:
        """The optimizers' options as they are now, before what a schedule makes of them."""
        return options_of(self.optimizers)

    def learning_rates(self) -> dict[str, list[float]]:
        """Learning rates of groups that schedules set, by the names of the schedules."""
        return {name: schedule.rates() for name, schedule in self._schedules().items()}

    def set_learning_rates(self, rates: Mapping[str, Sequence[float]]) -> None:
        """Set what `learning_rates` returned."""
        for name, schedule in self._schedules().items():
            schedule.set_rates(rates[name])

    def check(self, extra: dict[str, Any], step: int) -> None:
        """Raises CheckpointMismatch if the saved run had a different identity."""
        before = {**_IDENTITY_BEFORE, **extra["identity"]}
        differing = [name for name, now in self.identity.items() if name in before and before[name] != now]
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
        if self.schedulers and None not in (length, new_length) and length != new_length:
            yield (
                f"The checkpoint at step {loaded.step} is of a run of {length} steps, and this run has {new_length}. "
                "Learning rates of spottrain.schedules follow the new length from the next step on; other schedules "
                "may keep the old one."
            )
        saved = loaded.extra["schedulers"]
        every = (schedule.change(saved.get(name), loaded.step) for name, schedule in self._schedules().items())
        yield from filter(None, every)
        yield from self.history.without_effect(self.options(), loaded.extra.get("options", {}), loaded.step)
        new = self.stateful.keys() - set(loaded.extra["stateful"]) - {STABILITY, ORDER}
        if new:
            yield (
                f"The checkpoint at step {loaded.step} holds no state of {', '.join(sorted(new))} (stateful), which "
                "starts afresh. If the script has only renamed it, set the name back."
            )
        yield from dropped(self.by_rank, loaded)
        replaced = [name.removeprefix("model.") for name in loaded.replaced]
        if other := [name for name in replaced if name not in self.blank]:
            first, *more = other
            which = f"{first} and {len(more)} more" if more else first
            yield (
                f"Values that aren't trained differ from those in the checkpoint at step {loaded.step}, which "
                f"replaces them: {which}. That is right if training changes them, as those of batch norms in train "
                "mode and averages of weights. To train with the script's own, create a new job with a different "
                "checkpoint.uri."
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
        parts = [name for name in extra["stateful"] if f"{error.name}.".startswith(f"{PREFIX}{name}.")]
        return _without(tensors, extra, parts)
    records = {name: state for name, state in extra["records"].items() if codec.is_storable(state)}
    optimizers = {name: _fitting(tensors[name]) for name in extra["optimizers"]}
    parts = [*unfit_parts(tensors), *(extra["records"].keys() - records.keys())]
    left_out = [
        f"the optimizer's state of {name}"
        for key, kept in optimizers.items()
        for name in tensors[key]["state"]
        if name not in kept["state"]
    ]
    return _without({**tensors, **optimizers}, {**extra, "records": records}, parts, left_out)


def _without(
    tensors: dict[str, Any], extra: dict[str, Any], parts: Sequence[str], further: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """A state without these parts, and the sentence's part about them and what else was left out."""
    left_out = [*(f"the state of {name} (stateful)" for name in parts), *further]
    change = f"is without {', '.join(left_out)}, which a resume would start afresh" if left_out else None
    names = [name for name in extra["stateful"] if name not in parts]
    return without(tensors, parts), {**extra, "stateful": names}, change


def _is_trained(saved: Any) -> bool:
    """Whether something in a commit is a model or an optimizer."""
    return holds_tensors(saved) or (isinstance(saved, dict) and "groups" in saved)


def _fitting(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without that of parameters that no commit can hold."""
    states = {name: state for name, state in optimizer["state"].items() if _is_storable(state)}
    return {**optimizer, "state": states}


def _is_storable(state: dict[str, Any]) -> bool:
    try:
        codec.split(state)
    except UnsupportedState:
        return False
    return True


def model_config(model: nn.Module) -> dict[str, Any] | None:
    """Configuration of a Hugging Face model (`model.config`); None for others.

    It is as in the model's config.json.
    """
    as_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if as_json is None:
        return None
    config: dict[str, Any] = json.loads(as_json())
    return config
