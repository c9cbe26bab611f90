"""The state after a step, kept to commit it while the next step is under way.

Until its update, a step changes buffers, random numbers, and variables of the script. These are copied. Weights and
the optimizer's state are not: a commit takes them from where they are, and some elements are kept to see whether the
weights have changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from spottrain.checkpoint.format import codec
from spottrain.recovery.training_state import TrainingState

# Of the optimizer's parameters, the largest and some others are compared, at so many elements each.
NUM_LARGEST = 16
NUM_OTHERS = 16
NUM_ELEMENTS = 64
# Parts of `TrainingState.extra` that change.
_CHANGING = ("schedulers", "options", "records")


@dataclass(frozen=True, slots=True)
class WeightSample:
    """Some elements of the weights, to see whether they have changed."""

    _samples: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, state: TrainingState) -> WeightSample:
        """Take it from the optimizers' parameters, and from what the script changes itself."""
        optimizers = state.optimizers.values()
        trained = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        return cls([(each, _sample(each)) for some in (trained, state.models.beside()) for each in _chosen(some)])

    def is_same(self) -> bool:
        """Whether the weights have the same elements now."""
        return all(_is_equal(_sample(each), sample) for each, sample in self._samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedState:
    """The state after a step's update as it is now, with what the script does after the update.

    Implements CommitContents and Kept.

    Attributes:
        step: Number of the step.
        state: The state as it is now.
        weights: What the weights have to be.
        is_complete: Whether the step was complete.
    """

    step: int
    state: TrainingState
    weights: WeightSample
    is_complete: bool = False

    @classmethod
    def of(cls, state: TrainingState, step: int) -> UpdatedState:
        return cls(step=step, state=state, weights=WeightSample.of(state))

    def tensors(self) -> dict[str, Any]:
        return {**self.state.models.state_in_use(), **self.state.parts()}

    def frozen(self) -> set[str]:
        return self.state.models.frozen_in_use()

    def extra(self) -> dict[str, Any]:
        return self.state.extra()

    def alike(self) -> list[tuple[str, ...]]:
        return self.state.alike()

    def rank_state(self) -> dict[str, Any]:
        return self.state.rank_state()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState(UpdatedState):
    """The state after a step as it was when it was kept."""

    kept_extra: dict[str, Any]
    kept_changing: dict[str, dict[str, Any]]
    kept_parts: dict[str, Any]
    kept_rank_state: dict[str, Any]

    @classmethod
    def of(cls, state: TrainingState, step: int, *, is_complete: bool = True) -> KeptState:
        extra = state.extra()
        return cls(
            step=step,
            state=state,
            weights=WeightSample.of(state),
            is_complete=is_complete,
            kept_extra=extra | {name: copy.deepcopy(extra[name]) for name in _CHANGING},
            kept_changing={name: _copies(values) for name, values in state.models.changing().items()},
            kept_parts=_copies(state.parts()),
            kept_rank_state=copy.deepcopy(state.rank_state()),
        )

    def tensors(self) -> dict[str, Any]:
        tensors = self.state.models.state_in_use()
        changed = {name: {**tensors[name], **values} for name, values in self.kept_changing.items()}
        return {**tensors, **changed, **self.kept_parts}

    def extra(self) -> dict[str, Any]:
        return self.kept_extra

    def rank_state(self) -> dict[str, Any]:
        return self.kept_rank_state


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _chosen(parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What this rank has of the largest parameters, and of others at regular distances."""
    by_size = sorted(parameters, key=torch.Tensor.numel, reverse=True)
    others = by_size[NUM_LARGEST:]
    for each in by_size[:NUM_LARGEST] + others[:: max(1, len(others) // NUM_OTHERS)]:
        local = each.to_local() if isinstance(each, DTensor) else each
        if codec.is_plain(local) and local.numel():
            yield local.detach()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, in the order of its memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,)) if tensor.is_contiguous() else tensor.flatten()
    return flat[_places(tensor.numel(), tensor.device)]


@cache
def _places(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, NUM_ELEMENTS), dtype=torch.float64).long().to(device)


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes: NaN is equal to itself."""
    return first.shape == second.shape and torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
