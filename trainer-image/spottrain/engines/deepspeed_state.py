"""The state of DeepSpeed's optimizers in the format of checkpoints.

It has every tensor by its name, in parts. ZeRO flattens the weights that a rank optimises into a few fp32 tensors,
for which the optimizer has its state. This module cuts them into parts of parameters again, without a copy: a save
and a load use the memory of DeepSpeed itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from spottrain.checkpoint.errors import CheckpointMismatch
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.described import Described, as_described
from spottrain.engines.deepspeed_parts import FlatPart
from spottrain.engines.model_state import model_state, put_back
from spottrain.engines.named_state import MODEL, OPTIMIZER, NamedState
from spottrain.engines.optimizer_state import (
    Options,
    check_alike,
    check_classes,
    check_parameters,
    classes,
    is_same,
    named_group,
)
from spottrain.engines.own_numbers import changed_numbers, set_numbers
from spottrain.engines.parameter_state import Packing, StateRoom, room_beside_state, unpacked

Names = Mapping[nn.Parameter, str]


def state_of(engine: Any, base: Optimizer, names: Names) -> ReplicaState | ZeroState:
    """The state of a deepspeed.DeepSpeedEngine, whose optimizer works on `base`."""
    optimizer = engine.optimizer
    if optimizer is base:
        return ReplicaState(engine.module, base)
    layout = PerParameter(optimizer) if hasattr(optimizer, "fp32_partitioned_groups_flat") else PerGroup(optimizer)
    return ZeroState(engine.module, base, layout, names)


class ReplicaState(NamedState):
    """Stage 0: plain parameters and a plain optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._models, self._optimizers = {MODEL: model}, {OPTIMIZER: optimizer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """This rank's part of a parameter, in a flat tensor.

    Attributes:
        parameter: The parameter.
        shape: Its whole shape.
        flat: Number of the flat tensor.
        offset: Where the part starts in the flat tensor.
        begin: Where it starts in the flattened parameter.
        numel: Its number of elements; 0 if other ranks have the whole parameter.
    """

    parameter: nn.Parameter
    shape: torch.Size
    flat: int
    offset: int = 0
    begin: int = 0
    numel: int = 0

    def of(self, flat: torch.Tensor) -> FlatPart:
        """The part of `flat`, or of optimizer state of its shape."""
        return FlatPart(flat[self.offset : self.offset + self.numel], shape=self.shape, begin=self.begin)


class PerGroup:
    """Where stages 1 and 2 keep their weights: each rank has a range of one flat tensor.

    The flat tensor holds the parameters of a group, one after the other. It is the same for DeepSpeed's bf16
    optimizer of stage 1.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_bf16_optimizer = hasattr(optimizer, "bf16_groups")

    def flats(self) -> list[torch.Tensor]:
        """The fp32 tensors that the base optimizer works on."""
        optimizer = self._optimizer
        return list(
            optimizer.fp32_groups_flat_partition
            if self._is_bf16_optimizer
            else optimizer.single_partition_of_fp32_groups
        )

    def group(self, flat: int) -> int:
        """The parameter group, by number, of a flat tensor."""
        return flat

    def fragments(self) -> Iterator[Fragment]:
        """One fragment of each trained parameter, in the same order on all ranks."""
        optimizer = self._optimizer
        groups = optimizer.bf16_groups if self._is_bf16_optimizer else optimizer.bit16_groups
        for index, group in enumerate(groups):
            for parameter in group:
                yield self._fragment(parameter, index)

    def _fragment(self, parameter: Any, index: int) -> Fragment:
        mapping = parameter._hp_mapping
        if mapping is None:
            return Fragment(parameter=parameter, shape=parameter.shape, flat=index)
        return Fragment(
            parameter=parameter,
            shape=parameter.shape,
            flat=index,
            offset=mapping.hp_fragment_address.start,
            begin=mapping.lp_fragment_address.start,
            numel=mapping.lp_fragment_address.numel,
        )

    def frozen(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter that is not trained."""
        return parameter.detach()

    def refresh(self) -> None:
        """Copy the flat tensors to the parameters with which the model computes. A collective."""
        self._optimizer.update_lp_params()


class PerParameter:
    """Where stage 3 keeps its weights: each rank has a part of every parameter.

    Flat tensors of a bounded size (sub-groups) hold the parts, one after the other. The methods are as PerGroup's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._clear_padding()

    def flats(self) -> list[torch.Tensor]:
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def group(self, flat: int) -> int:
        group: int = self._optimizer.sub_group_to_group_id[flat]
        return group

    def fragments(self) -> Iterator[Fragment]:
        optimizer = self._optimizer
        for parameters in optimizer.fp16_groups:
            for parameter in parameters:
                flat, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                begin, numel = _own_part(parameter)
                yield Fragment(
                    parameter=parameter,
                    shape=parameter.ds_shape,
                    flat=flat,
                    offset=offset,
                    begin=begin,
                    numel=numel,
                )

    def _clear_padding(self) -> None:
        """Set padding to zero.

        DeepSpeed leaves what was in that memory, and an optimizer that uses a tensor as a whole would treat it as
        weights.
        """
        flats, ends = self.flats(), [0] * len(self.flats())
        for fragment in sorted(self.fragments(), key=lambda fragment: (fragment.flat, fragment.offset)):
            flats[fragment.flat].data[ends[fragment.flat] : fragment.offset] = 0
            ends[fragment.flat] = fragment.offset + fragment.numel
        for flat, end in zip(flats, ends, strict=True):
            flat.data[end:] = 0

    def frozen(self, parameter: Any) -> torch.Tensor:
        begin, numel = _own_part(parameter)
        return FlatPart(parameter.ds_tensor.flatten()[:numel], shape=parameter.ds_shape, begin=begin)

    def refresh(self) -> None:
        # As the optimizer does at the end of a step.
        optimizer = self._optimizer
        optimizer._partition_all_parameters()
        for index in range(len(self.flats())):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.invalidate_secondary_tensor()  # a node's own copy (zero_hpz_partition_size)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _own_part(parameter: Any) -> tuple[int, int]:
    """Start and number of elements of this rank's part. The last part may be padded, or be padding alone."""
    size = parameter.ds_tensor.ds_numel
    begin = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return begin, min(size, parameter.ds_numel - begin)


Layout = PerGroup | PerParameter


class ZeroState:
    """Stages 1 to 3."""

    def __init__(self, model: nn.Module, base: Optimizer, layout: Layout, names: Names) -> None:
        self._model = model
        self._base = base
        self._layout = layout
        self._names = names
        self._fragments = list(layout.fragments())
        self._room: dict[int, dict[str, torch.Tensor]] = {}  # by number of the flat tensor

    def state(self) -> dict[str, Any]:
        return {"model": self.model_state(), "optimizer": self._optimizer_state()}

    def room(self, saved: dict[str, Any]) -> dict[str, Any]:
        optimizer = saved["optimizer"]
        check_classes(optimizer, self._base)
        check_parameters(optimizer, {self._names[f.parameter]: f.parameter for f in self._fragments})
        self._room = {}
        flats, elementwise = self._layout.flats(), self._elementwise(optimizer)
        options = {name: group for group in optimizer["groups"] for name in group["params"]}
        states: dict[str, dict[str, Any]] = {}
        for fragment in self._fragments:
            name, flat = self._names[fragment.parameter], flats[fragment.flat]
            if (values := optimizer["state"].get(name)) is not None:
                parts = {key: self._place(fragment, flat, key, values[key]) for key in values.keys() & elementwise}
                others = {key: value for key, value in values.items() if key not in parts}
                states[name] = parts | StateRoom(flat, options.get(name, {})).of(others)
        return {"model": self.model_state(), "optimizer": {**room_beside_state(optimizer), "state": states}}

    def try_load(self) -> None:
        state = self.state()
        room, self._room = self.room(as_described(state)), {}
        check_alike(codec.split(state["optimizer"])[0], codec.split(room["optimizer"])[0])

    def model_state(self) -> dict[str, Any]:
        flats = self._layout.flats()
        weights = {self._names[f.parameter]: f.of(flats[f.flat]) for f in self._fragments}
        frozen = {
            name: self._layout.frozen(parameter) for parameter, name in self._names.items() if name not in weights
        }
        first = weights | frozen
        return {name: first[self._names[parameter]] for name, parameter in self._every_name()} | self._buffers()

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state and options, and refresh the parameters. Weights were loaded in place."""
        optimizer = state["optimizer"]
        for number, flat in enumerate(self._layout.flats()):
            self._base.state.pop(flat, None)
            if found := self._room.get(number, {}) | self._values(number, optimizer["state"]):
                self._base.state[flat] = found
        for key in self._state_beside():
            del self._base.state[key]
        self._base.state.update(unpacked(optimizer.get("others", {}).get("state", {})))
        set_numbers(self._base, optimizer.get("numbers", {}))
        options = Options(optimizer)
        for number, group in enumerate(self._base.param_groups):
            group.update(options.of(group, self._names_of_group(number)))
        buffers = {name: state["model"][name] for name in self._buffers()}
        self._model.load_state_dict(buffers, strict=False)
        put_back(self._model, buffers)
        self._layout.refresh()

    def _values(self, number: int, states: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The values of a flat tensor's state that all its parameters have in common, such as a counter."""
        found: dict[str, Any] = {}
        for name in [self._names[f.parameter] for f in self._fragments if f.flat == number]:
            values = {k: v for k, v in states.get(name, {}).items() if k not in self._room.get(number, {})}
            for key, value in values.items():
                if not is_same(found.setdefault(key, value), value):
                    raise CheckpointMismatch(
                        f"The optimizer's state {key!r} of {name} differs from that of other parameters in the "
                        "checkpoint, and ZeRO keeps one for all of them. Use the strategy before, or create a new "
                        "job with a different checkpoint.uri."
                    )
        return found

    def _optimizer_state(self) -> dict[str, Any]:
        flats = self._layout.flats()
        states: dict[str, dict[str, Any]] = {}
        for fragment in self._fragments:
            flat = flats[fragment.flat]
            if values := self._base.state.get(flat, {}):
                name = self._names[fragment.parameter]
                states[name] = {key: self._part(fragment, flat, key, value) for key, value in values.items()}
        return {
            "class": classes(self._base),
            "state": states,
            "groups": [
                named_group(group, names)
                for number, group in enumerate(self._base.param_groups)
                if (names := self._names_of_group(number))
            ],
            **({"others": {"state": Packing(None).of(beside)}} if (beside := self._state_beside()) else {}),
            **({"numbers": numbers} if (numbers := changed_numbers(self._base)) else {}),
        }

    def _state_beside(self) -> dict[Any, Any]:
        """The optimizer's state that is of no parameter."""
        return {key: value for key, value in self._base.state.items() if not isinstance(key, torch.Tensor)}

    def _part(self, fragment: Fragment, flat: torch.Tensor, key: str, value: Any) -> Any:
        """The part that a parameter has in a state of a flat tensor."""
        if isinstance(value, torch.Tensor) and value.shape == flat.shape and codec.is_plain(value):
            return fragment.of(value)
        return Packing(flat, is_cut=True).of({key: value})[key]

    def _place(self, fragment: Fragment, flat: torch.Tensor, key: str, wanted: Described) -> FlatPart:
        """Where a part of a state is loaded: in a state of the flat tensor, which all its parameters share."""
        of_flat = self._room.setdefault(fragment.flat, {})
        if key not in of_flat:
            present = self._base.state.get(flat, {}).get(key)
            fits = isinstance(present, torch.Tensor) and (present.shape, present.dtype) == (flat.shape, wanted.dtype)
            of_flat[key] = present if fits else torch.zeros_like(flat, dtype=wanted.dtype, requires_grad=False)
        return fragment.of(of_flat[key])

    def _elementwise(self, optimizer: dict[str, Any]) -> set[str]:
        """States that have a number for each element of a parameter.

        A scalar's moment has the shape of its counter, so that the other parameters decide.
        """
        shapes = {self._names[f.parameter]: f.shape for f in self._fragments}
        found: dict[str, list[tuple[torch.Size, torch.Size]]] = {}
        for name, values in optimizer["state"].items():
            for key, value in values.items():
                if isinstance(value, Described):
                    found.setdefault(key, []).append((value.shape, shapes[name]))
        for key, pairs in found.items():
            if any(stored != shape and stored.numel() > 1 for stored, shape in pairs):
                raise CheckpointMismatch(
                    f"The optimizer's state {key!r} in the checkpoint is not one number for each element of a "
                    "parameter, and ZeRO gives each rank a part of the elements. Use the strategy before, or create "
                    "a new job with a different checkpoint.uri."
                )
        return {
            key
            for key, pairs in found.items()
            if all(stored == shape for stored, shape in pairs) and (key != "step" or any(one for one, _ in pairs))
        }

    def _names_of_group(self, number: int) -> list[str]:
        return [self._names[f.parameter] for f in self._fragments if self._layout.group(f.flat) == number]

    def _every_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under all their names: tied ones have several."""
        return self._model.named_parameters(remove_duplicate=False)

    def _buffers(self) -> dict[str, Any]:
        parameters = {name for name, _ in self._every_name()}
        return {name: value for name, value in model_state(self._model).items() if name not in parameters}
