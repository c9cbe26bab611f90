"""States of single parameters: their form in a commit, and room to load them into.

The parts are those of optimizer_state.py and deepspeed_state.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from spottrain.checkpoint.errors import UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.described import Described
from spottrain.engines.wrapped_tensors import is_wrapping, taken_apart, together

Values = dict[str, Any]
Make = Callable[[tuple[str, ...], Described, Any], torch.Tensor]
"""Makes a tensor, given its keys, what it is to be, and what is there now."""

# The one state that torch's optimizers keep on the CPU beside parameters on an accelerator.
_ON_CPU = "step"


class StateRoom:
    """Makes tensors for the state of one parameter."""

    def __init__(self, parameter: torch.Tensor, options: Values, layouts: Values | None = None) -> None:
        self._parameter = parameter
        self._on_device = bool(options.get("capturable") or options.get("fused"))
        self._layouts = layouts or {}

    def of(self, saved: Values, present: Values | None = None) -> Values:
        made: Values = with_tensors(saved, self._make, present)
        return made

    def _make(self, path: tuple[str, ...], wanted: Described, present: Any) -> torch.Tensor:
        return present if _fits(present, wanted) else self._made(path, wanted)

    def _made(self, path: tuple[str, ...], wanted: Described) -> torch.Tensor:
        parameter, layout = self._parameter, self._layouts.get(".".join(path))
        is_like = wanted.shape == parameter.shape and not layout and path[-1] != _ON_CPU
        if isinstance(parameter, DTensor):
            if is_like and layout is None:
                return torch.empty_like(parameter, dtype=wanted.dtype, requires_grad=False)
            if layout or (layout is None and wanted.shape.numel() > 1):
                return _sharded(wanted, parameter, layout)
        elif is_like:  # with the strides of the parameter
            return torch.empty_like(parameter, dtype=wanted.dtype, requires_grad=False)
        device = "cpu" if path[-1] == _ON_CPU and not self._on_device else parameter.device
        return torch.empty(wanted.shape, dtype=wanted.dtype, device=device)


def room_beside_state(saved: Values) -> Values:
    """Tensors for what a commit holds of an optimizer besides the states of parameters, such as rates."""
    return {key: with_tensors(each, _on_cpu) for key, each in saved.items() if key != "state"}


def _on_cpu(_: tuple[str, ...], wanted: Described, __: Any) -> torch.Tensor:
    return torch.empty(wanted.shape, dtype=wanted.dtype)


def _sharded(wanted: Described, parameter: DTensor, layout: list[int] | None) -> DTensor:
    """A DTensor over the parameter's ranks that isn't spread like it.

    Without a layout, or at another number of dimensions of ranks, all ranks have it whole.
    """
    mesh = parameter.device_mesh
    fits = layout is not None and len(layout) == mesh.ndim
    placements: list[Placement] = [
        Replicate() if dimension < 0 else Shard(dimension) for dimension in (layout if fits and layout else ())
    ]
    found = torch.distributed.tensor.empty(
        *wanted.shape, dtype=wanted.dtype, device_mesh=mesh, placements=placements or [Replicate()] * mesh.ndim
    )
    return found


def with_tensors(saved: Any, make: Make, present: Any = None, path: tuple[str, ...] = ()) -> Any:
    """`saved` with what `make` makes in the place of descriptions. `present` is the state as it is now."""
    if isinstance(saved, Described):
        return make(path, saved, present)
    if isinstance(saved, dict):
        of = present if isinstance(present, dict) else {}
        return {key: with_tensors(value, make, of.get(key), (*path, str(key))) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        inner = present if isinstance(present, list | tuple) and len(present) == len(saved) else [None] * len(saved)
        pairs = zip(saved, inner, strict=True)
        return type(saved)(with_tensors(one, make, two, (*path, str(n))) for n, (one, two) in enumerate(pairs))
    return saved


def _fits(present: Any, wanted: Described) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(present, torch.Tensor)
        and (present.dtype, present.shape) == (wanted.dtype, wanted.shape)
        and not torch._debug_has_internal_overlap(present.to_local() if isinstance(present, DTensor) else present)
    )


class Packing:
    """The state of a parameter in the form of a commit.

    Attributes:
        layouts: How tensors are spread that aren't spread like the parameter, as one might think: the dimensions by
            which a DTensor is sharded (-1: it is replicated), none for a plain tensor.
    """

    def __init__(self, parameter: torch.Tensor | None, *, is_cut: bool = False) -> None:
        """`is_cut`: whether a rank has a part of the parameter. A DTensor is cut."""
        self._parameter = parameter
        self._is_cut = is_cut or isinstance(parameter, DTensor)
        self.layouts: dict[str, list[int]] = {}

    def of(self, value: Any, path: str = "") -> Any:
        """The value, with an Unfit in the place of what no commit can hold."""
        if isinstance(value, dict):
            return {key: self.of(each, f"{path}.{key}") for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(each, f"{path}.{number}") for number, each in enumerate(value))
        return self._tensor(value, path.removeprefix(".")) if isinstance(value, torch.Tensor) else value

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        parameter = self._parameter
        if isinstance(value, DTensor):
            if (
                parameter is None
                or is_wrapping(value.to_local())
                or any(isinstance(each, Partial) for each in value.placements)
            ):
                return codec.Unfit(_not_of_elements(path, value))
            if not (isinstance(parameter, DTensor) and _is_spread_alike(value, parameter)):
                self.layouts[path] = [each.dim if isinstance(each, Shard) else -1 for each in value.placements]
            return value
        if self._is_cut and value.numel() > 1:
            return codec.Unfit(_not_of_elements(path, value))
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            self.layouts[path] = []
        if is_wrapping(value):
            try:
                return taken_apart(value, path)
            except UnsupportedState as error:
                return codec.Unfit(str(error))
        if not codec.is_plain(value):
            return codec.Unfit(
                f"The optimizer's state {path!r} is a {type(value).__name__} ({value.dtype}, {value.layout}), which "
                "a checkpoint can't hold. Use another optimizer."
            )
        return value


def _is_spread_alike(value: DTensor, parameter: DTensor) -> bool:
    return (value.shape, value.placements) == (parameter.shape, parameter.placements)


def _not_of_elements(name: str, value: torch.Tensor) -> str:
    """The sentence for a state that belongs to a rank's part of a parameter as a whole.

    Examples are the scales of an 8-bit optimizer: each rank has different ones, and a checkpoint holds one.
    """
    return (
        f"The optimizer's state {name!r} of shape {list(value.shape)} is not one number for each element of a "
        "parameter, and cannot be saved if parameters are sharded; use another optimizer, or the strategy ddp."
    )


def unpacked(value: Any) -> Any:
    """A state as the optimizer had it, from its form in a commit."""
    if isinstance(value, dict):
        whole = together(value)
        return {key: unpacked(each) for key, each in value.items()} if whole is None else whole
    return type(value)(map(unpacked, value)) if type(value) in (list, tuple) else value


def as_loaded(now: Any, loaded: Any) -> Any:
    """`now`, with tensors as they were loaded where torch has changed their type or device."""
    if isinstance(loaded, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if (now.dtype, now.device) == (loaded.dtype, loaded.device) else loaded
    if isinstance(loaded, dict) and isinstance(now, dict):
        return {key: as_loaded(value, loaded.get(key)) for key, value in now.items()}
    if type(loaded) in (list, tuple) and type(now) is type(loaded) and len(now) == len(loaded):
        return type(now)(as_loaded(*pair) for pair in zip(now, loaded, strict=True))
    return now
