"""The state of an optimizer in a checkpoint, by the names of parameters.

It is read and loaded by the optimizer's own `state_dict` and `load_state_dict`. The optimizer is never stepped for
it: a step may count, decay weights, or be refused. So an optimizer without state has none in a commit, and a resume
builds the state from the commit's description.

    {"class": ["AdamW", "Adam"],
     "state": {"layer.weight": {"exp_avg": tensor, "step": tensor}},
     "groups": [{"params": ["layer.weight"], "lr": 0.1}],
     "others": {...},                    # what the optimizer's state_dict has besides
     "numbers": {...},                   # attributes that change with its steps (own_numbers.py)
     "layouts": {"layer.weight": {...}}} # of tensors that aren't spread like their parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from spottrain.checkpoint.errors import CheckpointMismatch, UnsupportedState
from spottrain.checkpoint.format import codec
from spottrain.checkpoint.format.described import as_described
from spottrain.checkpoint.saving.fingerprint import digest
from spottrain.engines.inner_optimizers import check_inner, share_again, sharing
from spottrain.engines.own_numbers import changed_numbers, set_numbers
from spottrain.engines.parameter_state import Packing, StateRoom, Values, as_loaded, room_beside_state, unpacked

Names = Mapping[torch.Tensor, str]

# Options of groups that follow from the parameters. `param_names` has the names of a wrapper, and all of them.
_OF_PARAMETERS = ("params", "param_names")
# Options with this beginning belong to a schedule. The script may have none any more.
_OF_SCHEDULES = "initial_"


class NamedOptimizer:
    """Reads and loads the state of an optimizer of plain or sharded parameters."""

    def __init__(self, optimizer: Optimizer, names: Names) -> None:
        """`names` has a name for each of the optimizer's parameters."""
        self._optimizer = optimizer
        self._names = names

    def state(self) -> Values:
        """What a commit holds, with an Unfit in the place of what it can't hold."""
        groups, states, others = self._parts()
        found: dict[str, Values] = {}
        layouts: dict[str, dict[str, list[int]]] = {}
        for number, parameter in self._numbered(groups).items():
            if number in states:
                name = self._names[parameter]
                packing = Packing(parameter)
                found[name] = packing.of(states.pop(number))
                layouts |= {name: packing.layouts} if packing.layouts else {}
        if states:
            others["state"] = Packing(None).of(states)
        return {
            "class": classes(self._optimizer),
            "state": found,
            "groups": [
                named_group(group, [self._names[each] for each in own["params"]])
                for group, own in zip(groups, self._optimizer.param_groups, strict=True)
                if own["params"]
            ],
            **({"others": others} if others else {}),
            **({"numbers": numbers} if (numbers := changed_numbers(self._optimizer)) else {}),
            **({"layouts": layouts} if layouts else {}),
        }

    def room(self, saved: Values, *, reuse: bool = True) -> Values:
        """Tensors to load a commit into.

        Args:
            saved: The optimizer's part of a commit, with a Described in the place of each tensor.
            reuse: Take tensors of the present state that fit.

        Raises:
            CheckpointMismatch: The commit is of another optimizer, or of other parameters.
        """
        check_classes(saved, self._optimizer)
        parameters = {self._names[each]: each for group in self._optimizer.param_groups for each in group["params"]}
        check_parameters(saved, parameters)
        present = self.state()["state"] if reuse and saved["state"] else {}
        options = {name: group for group in saved["groups"] for name in group["params"]}
        layouts = saved.get("layouts", {})
        return {
            **room_beside_state(saved),
            "state": {
                name: StateRoom(parameters[name], options.get(name, {}), layouts.get(name, {})).of(
                    values, present.get(name)
                )
                for name, values in saved["state"].items()
            },
        }

    def load(self, saved: Values) -> None:
        """Load a commit whose tensors were filled in. Raises CheckpointMismatch."""
        groups, _, _ = self._parts()
        numbered = self._numbered(groups)
        states = {number: saved["state"].get(self._names[each]) for number, each in numbered.items()}
        loaded: dict[Any, Any] = {number: unpacked(values) for number, values in states.items() if values is not None}
        others = dict(saved.get("others", {}))
        loaded |= unpacked(others.pop("state", {}))
        options, shared = Options(saved), sharing(self._optimizer)
        self._optimizer.load_state_dict(
            {
                "state": dict(loaded),
                "param_groups": [
                    {**options.of(group, [self._names[each] for each in own["params"]]), "params": group["params"]}
                    for group, own in zip(groups, self._optimizer.param_groups, strict=True)
                ],
                **unpacked(others),
            }
        )
        share_again(self._optimizer, shared)
        # torch casts most of it to the types of parameters. An optimizer chooses the types of its state.
        now = self._parts()[1]
        for number, values in now.items():
            if number in loaded and isinstance(values, dict):
                values.update(as_loaded(values, loaded[number]))
        set_numbers(self._optimizer, saved.get("numbers", {}))

    def try_load(self) -> None:
        """Load the state of one parameter of each kind into room of its own, and compare.

        Raises UnsupportedState if it is another then.
        """
        saved = self.state()
        parameters = {self._names[each]: each for group in self._optimizer.param_groups for each in group["params"]}
        options = {name: group for group in saved["groups"] for name in group["params"]}
        for name in _one_of_each_kind(saved["state"], parameters):
            values, parameter = saved["state"][name], parameters[name]
            room = StateRoom(parameter, options[name], saved.get("layouts", {}).get(name))
            tensors, made = codec.split(values)[0], room.of(as_described(values))
            places = codec.split(made)[0]
            check_alike(tensors, places)
            for key, tensor in tensors.items():
                _local(places[key]).copy_(_local(tensor))
            again = codec.split(Packing(parameter).of(unpacked(made)))[0]
            check_alike(tensors, again)
            for key, tensor in tensors.items():
                if digest([_local(tensor)]) != digest([_local(again[key])]):
                    raise UnsupportedState(
                        f"The optimizer's state {key!r} of {name} has other values after it is loaded. Use another "
                        "optimizer."
                    )

    def _parts(self) -> tuple[list[Values], dict[Any, Any], Values]:
        """The groups, the states by number of parameter or another key, and what else there is."""
        found = dict(state_dict_of(self._optimizer))
        check_inner(self._optimizer, found)
        return found.pop("param_groups"), dict(found.pop("state")), found

    def _numbered(self, groups: list[Values]) -> dict[Any, torch.Tensor]:
        """The parameters by the numbers that the optimizer's state_dict gives them."""
        pairs = zip(groups, self._optimizer.param_groups, strict=True)
        return {n: p for group, own in pairs for n, p in zip(group["params"], own["params"], strict=True)}


def check_alike(saved: codec.Tensors, loaded: codec.Tensors) -> None:
    """Raise UnsupportedState if tensors that were loaded are of other names, types or forms than those saved."""
    for name in saved.keys() | loaded.keys():
        one, two = (_form(each.get(name)) for each in (saved, loaded))
        if one != two:
            raise UnsupportedState(
                f"The optimizer's state {name!r} could not be loaded again: it is saved as {one}, and loaded as "
                f"{two}. Use another optimizer."
            )


def _form(tensor: Any) -> str:
    if tensor is None:
        return "nothing"
    spread = f" of {list(tensor.placements)}" if isinstance(tensor, DTensor) else ""
    return f"{type(tensor).__name__}{spread}, {tensor.dtype}, {list(tensor.shape)}"


def _one_of_each_kind(states: Values, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """For each form of a state, the name of the smallest parameter that has it."""
    found: dict[str, str] = {}
    for name in sorted(states, key=lambda name: parameters[name].numel()):
        tensors, _ = codec.split(states[name])
        kinds = [(key, type(each).__name__, str(each.dtype)) for key, each in tensors.items()]
        found.setdefault(f"{type(parameters[name]).__name__} {kinds}", name)
    return list(found.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_dict_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer says of its state. Raises UnsupportedState."""
    try:
        return optimizer.state_dict()
    except Exception as error:  # of the script's optimizer: anything
        raise UnsupportedState(
            f"The optimizer {type(optimizer).__name__} doesn't give its state (its state_dict raises {error!r}), and "
            "no commit could hold it. Use another optimizer."
        ) from error


def classes(optimizer: Optimizer) -> list[str]:
    """Names of the class and of those that it extends."""
    every = type(optimizer).__mro__
    return [kind.__name__ for kind in every if issubclass(kind, Optimizer) and kind is not Optimizer]


def check_classes(saved: Values, optimizer: Optimizer) -> None:
    """Raise CheckpointMismatch for a state that an optimizer of another kind has made."""
    here = classes(optimizer)
    if saved["state"] and not set(saved["class"]) & set(here):
        raise CheckpointMismatch(
            f"The checkpoint holds the state of the optimizer {saved['class'][0]}, and the script makes {here[0]}, "
            "which can't continue from it. Use the one before, or create a new job with a different checkpoint.uri."
        )


def check_parameters(saved: Values, here: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if the optimizer of a commit had other parameters than those `here`.

    Frozen ones may be missing: under ZeRO, an optimizer doesn't have them.
    """
    before = {name for group in saved["groups"] for name in group["params"]}
    trained = {name for name, parameter in here.items() if parameter.requires_grad}
    for names, sentence in (
        (trained - before, "the optimizer trains {}, which that of the checkpoint did not"),
        (saved["state"].keys() - here.keys(), "the optimizer of the checkpoint trained {}, which this one does not"),
    ):
        if names:
            first, *more = sorted(names)
            which = f"{first} and {len(more)} more" if more else first
            raise CheckpointMismatch(
                f"The checkpoint does not fit the script: {sentence.format(which)}. Let it train the same "
                "parameters, or create a new job with a different checkpoint.uri."
            )


def named_group(group: Values, names: list[str]) -> Values:
    """A group of parameters in a commit."""
    options = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
    return {"params": names, **Packing(None).of(options)}


class Options:
    """The options of groups in a commit, for groups that the script may form otherwise."""

    def __init__(self, saved: Values) -> None:
        self._of = {name: group for group in saved["groups"] for name in group["params"]}

    def of(self, group: Values, names: list[str]) -> Values:
        """The options for a group of these parameters, `group` without them.

        Options that the commit lacks stay, such as those that a new schedule adds. Raises CheckpointMismatch if the
        parameters had different options.
        """
        own = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
        names = [name for name in names if name in self._of]
        if not names:
            return own
        first = self._of[names[0]]
        for name in names[1:]:
            if (other := self._of[name]) is not first:
                _check_same_options(first, other, names[0], name)
        return own | {
            key: _where(own.get(key), value)
            for key, value in first.items()
            if key not in _OF_PARAMETERS and (key in own or not key.startswith(_OF_SCHEDULES))
        }


def _where(own: Any, value: Any) -> Any:
    """An option, on the device of the script's own."""
    return value.to(own.device) if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) else value


def is_same(one: Any, two: Any) -> bool:
    """Whether two values of a state or an option are equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _check_same_options(first: Values, other: Values, name: str, other_name: str) -> None:
    for key in (first.keys() | other.keys()) - {*_OF_PARAMETERS}:
        one, two = first.get(key), other.get(key)
        if not is_same(one, two):
            raise CheckpointMismatch(
                f"The script has {name} and {other_name} in one group of the optimizer, and in the checkpoint they "
                f"differ in {key} ({one} and {two}). Give each a group of its own, as it was, or create a new job "
                "with a different checkpoint.uri."
            )
