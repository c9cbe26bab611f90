"""State that differs from rank to rank, such as the hidden state that a recurrent network carries on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import IterableDataset

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.loading.loader import Loaded
from spottrain.engines.parameter_state import unpacked
from spottrain.recovery.script_parts import Stateful, load_part, packed

_OF_ITS_OWN = 'say what becomes of it: ByRank(..., at_another_size="drop"), or a function'
_OF_A_LOADER = (
    "let the session read the data, in one order at any number of ranks: dataset=, with items by index or as "
    "spottrain.data.Streams"
)

Remap = Callable[[list[dict[str, Any]], int, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ByRank:
    """State of each rank's own, to be given to `Session.attach` by name.

    A commit holds that of each rank, and a resume with as many ranks restores it, with tensors on the CPU.

    Attributes:
        value: A list, a dict, an array, or an object with state_dict and load_state_dict.
        at_another_size: What a resume with another number of ranks does. "refuse": it ends the run. "drop": the state
            stays as the script made it. A function: it is given the states of the ranks that saved, in order of rank,
            the number of this rank and the number of ranks, and returns this rank's state. A dict is its own state,
            and that of a list or an array has the key `values`.

    Example:
        >>> from spottrain import ByRank
        >>> carried = ByRank({"hidden": None}, at_another_size="drop")
    """

    value: Any
    at_another_size: Literal["refuse", "drop"] | Remap = "refuse"


def is_loader(value: Any) -> bool:
    """Whether something reads data, with a place of its rank's own: a StatefulDataLoader, or a stateful data set."""
    return hasattr(value, "__iter__") and (isinstance(value, IterableDataset) or hasattr(value, "dataset"))


def advice_on(value: Any) -> str:
    """What to do about state of each rank's own if the number of ranks changes."""
    return _OF_A_LOADER if is_loader(value) else _OF_ITS_OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A part of a run of which each rank has a state of its own.

    Attributes:
        part: This rank's.
        rank: Number of this rank.
        world_size: Number of ranks.
        at_another_size: As in `ByRank`.
        is_dealt: Whether `at_another_size` is called at the same number of ranks, too: the states are parts of one,
            which is dealt to the ranks.
    """

    part: Stateful
    rank: int
    world_size: int
    at_another_size: Literal["refuse", "drop"] | Remap
    is_dealt: bool = False

    def state_in(self, name: str, loaded: Loaded) -> dict[str, Any] | None:
        """This rank's state in a commit that holds it. None: it starts afresh. Raises CheckpointMismatch."""
        if loaded.rank_state is not None and not self.is_dealt:
            own: dict[str, Any] = unpacked(loaded.rank_state["parts"][name])
            return own
        if callable(self.at_another_size):
            every = [unpacked(codec.join(each["parts"][name], loaded.rank_tensors)) for each in loaded.rank_states]
            return self.at_another_size(every, self.rank, self.world_size)
        if self.at_another_size == "drop":
            return None
        raise CheckpointMismatch(
            f"The checkpoint at step {loaded.step} holds {name} of {len(loaded.rank_states)} ranks, and there are "
            f"{self.world_size} now. Resume with as many ranks, or {advice_on(self.part)}."
        )

    def needs_every_rank(self, num_saved: int) -> bool:
        """Whether it is made of the states of all ranks that saved."""
        return callable(self.at_another_size) and (self.is_dealt or num_saved != self.world_size)


def rank_states_of(parts: Mapping[str, RankPart]) -> dict[str, Any]:
    """What this rank saves of its parts."""
    return {name: packed(each.part.state_dict(), name) for name, each in parts.items()}


def load_rank_parts(parts: Mapping[str, RankPart], loaded: Loaded) -> None:
    """Restore this rank's parts that the commit holds. Raises CheckpointMismatch."""
    for name, each in parts.items():
        if all(name in saved["parts"] for saved in loaded.rank_states):
            state = each.state_in(name, loaded)
            if state is not None:
                load_part(name, each.part, state, loaded.step, advice="Let its load_state_dict take that state, too")


def dropped(parts: Mapping[str, RankPart], loaded: Loaded) -> Iterator[str]:
    """A sentence about state that a resume with another number of ranks leaves out."""
    names = [name for name, each in parts.items() if each.at_another_size == "drop"]
    if names and loaded.rank_state is None:
        yield (
            f"The checkpoint at step {loaded.step} is of another number of ranks ({len(loaded.rank_states)}), and "
            f"{', '.join(names)}, which is each rank's own, starts afresh."
        )
