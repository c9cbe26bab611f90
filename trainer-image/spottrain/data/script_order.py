"""The script's own order of samples: what its function returns for each epoch.

The function returns indices, as samplers do, or batches of indices, as batch samplers do. An epoch has as many
samples as it returns, and a batch is that of one step, over all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.data import random_state
from spottrain.data.batches import Batches
from spottrain.data.order import Epoch, Indices, fingerprint

OrderFunction = Callable[[int], Any]
"""Takes the number of an epoch, from 0, and returns its indices, or its batches of indices."""

# Epochs that are kept: workers are fetching the next one while a step of the one before ends.
_NUM_KEPT = 3
_ADVICE = "return a list, tensor or array of indices, or a list of batches of indices"


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What the function returned for an epoch, checked."""

    samples: Indices
    ends: Indices | None
    fingerprint: int

    @classmethod
    def of(cls, samples: Indices, ends: Indices | None = None) -> _Drawn:
        return cls(samples, ends, fingerprint(samples.tobytes() + (ends.tobytes() if ends is not None else b"")))


class ScriptOrder:
    """Epoch after epoch as a function of the script returns them. Implements DataOrder.

    The function is called with generators that are seeded by seed and epoch. So it may draw random numbers from them.

    Attributes:
        num_samples: Samples of the data set.
        seed: Seed of the random numbers.
    """

    kind = "order="
    is_regular = False

    def __init__(
        self,
        function: OrderFunction,
        *,
        num_samples: int,
        seed: int,
        largest_batch: int,
        checking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Try the function for the first epoch, twice.

        Args:
            function: The script's.
            num_samples: Samples of the data set.
            seed: Seed of the random numbers.
            largest_batch: Largest number of samples of a batch.
            checking: Surrounds each check of what the function returns, which raises ValueError.

        Raises:
            ValueError: It is not a function, or not a pure one, or it returns something else than indices.
        """
        if not callable(function):
            raise ValueError(
                f"order ({type(function).__name__}) is not a function; pass a function of the epoch, as in "
                "order=lambda epoch: torch.randperm(len(dataset))"
            )
        self.num_samples = num_samples
        self.seed = seed
        self._function = function
        self._largest_batch = largest_batch
        self._checking = checking
        self._starts = [(0, 0)]  # first position and number of epochs, without gaps
        self._drawn = OrderedDict({0: self._draw(0)})
        if self._draw(0).fingerprint != self._drawn[0].fingerprint:
            raise ValueError(
                "order(0) returned another order when it was called again, and a resumed run calls it again; let it "
                "depend on the epoch alone: make generators inside it, as in "
                "torch.Generator().manual_seed(epoch)"
            )

    def samples(self, positions: Sequence[int] | Indices) -> Indices:
        asked = np.asarray(positions, dtype=np.int64)
        found = np.full_like(asked, -1)
        while (missing := found < 0).any():
            epoch = self.epoch_at(int(asked[missing].min()))
            chosen = missing & (asked < epoch.positions.stop)
            found[chosen] = self._of(epoch.number).samples[asked[chosen] - epoch.positions.start]
        return found

    def epoch_at(self, position: int) -> Epoch:
        start, number = self._starts[bisect_right(self._starts, position, key=lambda known: known[0]) - 1]
        while position >= (stop := start + len(self._of(number).samples)):
            start, number = stop, number + 1
            self._starts.append((start, number))
        drawn = self._of(number)
        return Epoch(number=number, positions=range(start, stop), fingerprint=drawn.fingerprint, ends=drawn.ends)

    def start_at(self, number: int, position: int) -> None:
        """Note where an epoch starts, so that those before it need not be drawn."""
        self._starts = [(position, number)]

    def _of(self, number: int) -> _Drawn:
        if number not in self._drawn:
            self._drawn[number] = self._draw(number)
        self._drawn.move_to_end(number)
        while len(self._drawn) > _NUM_KEPT:
            self._drawn.popitem(last=False)
        return self._drawn[number]

    def _draw(self, number: int) -> _Drawn:
        with random_state.host_untouched():
            random_state.seed_host(self.seed, step=-1 - number)  # positions have the other numbers
            made = self._function(number)
            with self._checking():
                drawn = _checked(made, f"order({number})")  # a sampler draws now
        with self._checking():
            self._check_samples(drawn.samples, f"order({number})")
            if drawn.ends is not None:
                self._check_batches(np.diff(drawn.ends, prepend=0), f"order({number})")
        return drawn

    def _check_samples(self, samples: Indices, name: str) -> None:
        if not len(samples):
            raise ValueError(f"{name} has no samples; an epoch needs one at least")
        outside = np.flatnonzero((samples < 0) | (samples >= self.num_samples))
        if len(outside):
            raise ValueError(
                f"{name} has the index {samples[outside[0]]} at place {outside[0]}, and the data set has the samples "
                f"0 to {self.num_samples - 1}; {_ADVICE}"
            )

    def _check_batches(self, sizes: Indices, name: str) -> None:
        if (sizes == 0).any():
            raise ValueError(f"batch {np.argmin(sizes)} of {name} has no samples; leave it out")
        if (largest := sizes.max()) > self._largest_batch:
            raise ValueError(
                f"batch {np.argmax(sizes)} of {name} has {largest} samples, and batch.global is "
                f"{self._largest_batch}: a batch is that of one step, over all ranks. Raise batch.global to the size "
                "of the largest batch, or return smaller ones"
            )


class OrderPlace:
    """Where a run is in the script's order. Implements Stateful.

    A commit holds the start of the epoch under way, so that a resume need not draw the epochs before it, and the
    epoch's fingerprint, so that a resume in another order is noticed.
    """

    def __init__(self, order: ScriptOrder, batches: Callable[[], Batches]) -> None:
        """`batches` are those of the loop, once it has begun."""
        self._order = order
        self._batches = batches
        self.step = 0
        """Steps completed."""

    def state_dict(self) -> dict[str, Any]:
        if self.step == 0:
            return {"step": 0}
        batches = self._batches()
        epoch = batches.at(self.step - 1).epoch
        first_step = batches.epoch_of(self.step - 1)[0].start if epoch.ends is not None or batches.by_epoch else 0
        return {
            "step": self.step,
            "first_step": first_step,
            "epoch": epoch.number,
            "position": epoch.positions.start,
            "fingerprint": epoch.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Raises CheckpointMismatch if the order is another one now."""
        self.step = state_dict["step"]
        if self.step == 0:
            return
        number, position = state_dict["epoch"], state_dict["position"]
        self._order.start_at(number, position)
        self._batches().start_at(state_dict["first_step"], position)
        if self._order.epoch_at(position).fingerprint != state_dict["fingerprint"]:
            raise CheckpointMismatch(
                f"The checkpoint at step {self.step} was made with another order of samples: order({number}) returns "
                "other indices now. Let it depend on the epoch alone, and set it back, or create a new job with a "
                "different checkpoint.uri."
            )


def _checked(made: Any, name: str) -> _Drawn:
    if isinstance(made, str | bytes | dict) or not hasattr(made, "__len__"):
        raise ValueError(f"{name} is a {type(made).__name__}, which is no sequence of indices; {_ADVICE}")
    rows = _array(made)
    if rows is not None and rows.ndim == 1 and rows.dtype.kind in "iu":
        return _Drawn.of(rows.astype(np.int64))
    batches = [_array(each) if hasattr(each, "__len__") else None for each in made]
    for place, batch in enumerate(batches):
        if batch is None or batch.ndim != 1 or (len(batch) and batch.dtype.kind not in "iu"):
            raise ValueError(f"{name} has at place {place} neither an index nor a list of indices; {_ADVICE}")
    if not batches:
        return _Drawn.of(np.empty(0, np.int64))
    samples = np.concatenate([each.astype(np.int64) for each in batches if each is not None])
    return _Drawn.of(samples, np.cumsum([len(each) for each in batches if each is not None]))


def _array(values: Any) -> np.ndarray[Any, Any] | None:
    """The values as an array; None if they have none, as lists of different lengths."""
    if hasattr(values, "numpy"):  # a tensor
        values = values.cpu()
    elif not isinstance(values, np.ndarray):
        values = list(values)
    try:
        return np.asarray(values)
    except ValueError:
        return None
