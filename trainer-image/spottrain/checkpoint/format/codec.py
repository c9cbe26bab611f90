"""State without pickle: named tensors and JSON.

A state is a tree of tensors and plain values. Every container and value keeps its type: tuples stay tuples, integer
keys stay integers, NaN stays NaN. Only numpy's scalars become Python's. A value that JSON lacks becomes an object
with one key that starts with '$'. So does a small tensor or array among plain values.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spottrain.checkpoint.errors import CorruptCheckpoint, UnsupportedState
from spottrain.checkpoint.format.manifest import DTYPES

Json = Any
Tensors = dict[str, torch.Tensor]

# Limit of the tensors among plain values, in total: they are read with every manifest.
MAX_INLINE_BYTES = 1 << 20
# Of these, what the state of a rank has at most: a manifest has those of all ranks.
_OF_A_RANK_BYTES = 64 << 10
# With this begin the names of a rank's own tensors, and those of no part.
OF_A_RANK = "$rank"
# Levels of JSON in a state. Parsers such as pydantic's stop at some two hundred, writers don't.
MAX_LEVELS = 180
_SHOWN_LEVELS = 5
# Kinds of numpy's arrays whose bytes are all that there is to them: numbers and truth values.
ARRAYS = "biufc"


@dataclass(frozen=True, slots=True)
class Unfit:
    """A value in a state that can't be stored, and the sentence that says why.

    A rank that finds such a value puts this in its place. All ranks then learn of it together, when one encodes it.
    """

    sentence: str


def is_storable(value: Any) -> bool:
    """Whether a commit can hold a plain value."""
    if type(value) in (bool, int, float, type(None)):
        return True
    try:
        encode(value)
    except UnsupportedState:
        return False
    return True


def is_tensor(value: object) -> bool:
    """Whether DCP stores this value as (a shard of) a tensor."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")


def split(state: Mapping[str, Any]) -> tuple[Tensors, Json]:
    """Separate a state into its tensors and a JSON tree that refers to them.

    Args:
        state: Tensors and plain values (dict, list, tuple, str, int, float, bool, bytes, None, and numpy's scalars
            and arrays).

    Returns:
        The tensors by name, and the tree. A tensor's name is its path in the state, joined by dots.

    Raises:
        UnsupportedState: A value is neither a tensor nor plain, lies too deep, or is a string that UTF-8 can't
            hold. The message names its key.
    """
    tensors: Tensors = {}

    def name(path: tuple[str, ...], tensor: torch.Tensor) -> Json:
        fqn = ".".join(path)
        if fqn in tensors:
            raise UnsupportedState(f"Two tensors of the state have the name {fqn!r}; rename one of them.")
        tensors[fqn] = tensor
        return {"$tensor": fqn}

    return tensors, _encode(dict(state), (), name)


def encode(value: Any) -> Json:
    """Encode plain values as JSON, with the small tensors among them.

    Args:
        value: Plain values and tensors. `decode` returns the tensors on the CPU.

    Raises:
        UnsupportedState: As `split`; also if a tensor is too large, or not plain (sharded, sparse, quantized, of a
            subclass).
    """
    room = MAX_INLINE_BYTES

    def inline(path: tuple[str, ...], tensor: Any) -> Json:
        nonlocal room
        if not is_plain(tensor):
            raise _unsupported(path, tensor)
        room -= tensor.nbytes
        if room < 0:
            raise UnsupportedState(
                f"The tensor at {'.'.join(path) or 'its top'!r} is one too many: beside model and optimizer, a "
                f"checkpoint stores tensors of {MAX_INLINE_BYTES >> 20} MiB in total. "
                "Keep large ones in a part of the script's own (stateful)."
            )
        return _small(tensor)

    return _encode(value, (), inline)


def encode_of_rank(value: Any, rank: int) -> tuple[Tensors, Json]:
    """Encode a rank's own plain values, with their tensors apart from the first ones of 64 KiB on.

    Returns:
        The tensors by names that no other rank has, and the JSON. `join` puts them together again.

    Raises:
        UnsupportedState: As `encode`, but for the size.
    """
    tensors: Tensors = {}
    room = _OF_A_RANK_BYTES

    def place(path: tuple[str, ...], tensor: Any) -> Json:
        nonlocal room
        if not is_plain(tensor):
            raise _unsupported(path, tensor)
        if tensor.nbytes <= room:
            room -= tensor.nbytes
            return _small(tensor)
        name = f"{OF_A_RANK}.{rank}.{len(tensors)}"
        tensors[name] = tensor.detach()
        return {"$tensor": name}

    return tensors, _encode(value, (), place)


def decode(tree: Json) -> Any:
    """The opposite of `encode`. Raises CorruptCheckpoint."""
    return join(tree, {})


def join(tree: Json, tensors: Mapping[str, Any]) -> Any:
    """The opposite of `split`. Raises CorruptCheckpoint."""
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if tag.startswith("$"):
        return _decode_tagged(tag, tree[tag], tensors)
    return {key: join(item, tensors) for key, item in tree.items()}


def tensors_in(tree: Json) -> Iterator[str]:
    """The names of the tensors to which a tree refers."""
    if isinstance(tree, dict) and tree.keys() == {"$tensor"}:
        yield tree["$tensor"]
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def _encode(
    value: Any, path: tuple[str, ...], tensor: Callable[[tuple[str, ...], torch.Tensor], Json], level: int = 0
) -> Json:
    if level > MAX_LEVELS:
        raise UnsupportedState(
            f"The state at {'.'.join(path[:_SHOWN_LEVELS])!r} is nested too deep. Turn it into a flat list or dict "
            "first."
        )
    if is_tensor(value):
        return tensor(path, value)
    if isinstance(value, Unfit):
        raise UnsupportedState(value.sentence)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return _encode_dict(value, path, tensor, level)
    if type(value) in (list, tuple):
        inner = level + (1 if type(value) is list else 2)
        items = [_encode(item, (*path, str(index)), tensor, inner) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    return _encode_plain(value, path)


def _encode_plain(value: Any, path: tuple[str, ...]) -> Json:
    # Exact types: a subclass (an enum, a namedtuple) would not come back as what it was.
    kind = type(value)
    if value is None or kind in (bool, int):
        return value
    if kind is str:
        return _checked(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is np.ndarray and value.dtype.kind in ARRAYS:
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise _unsupported(path, value)


def _encode_dict(
    value: dict[Any, Any], path: tuple[str, ...], tensor: Callable[[tuple[str, ...], torch.Tensor], Json], level: int
) -> Json:
    has_names = all(type(key) is str and not key.startswith("$") for key in value)
    inner = level + (1 if has_names else 3)
    encoded = [(key, _encode(item, (*path, str(key)), tensor, inner)) for key, item in value.items()]
    if has_names:
        return {_checked(key, (*path, key)): item for key, item in encoded}
    return {"$items": [[_encode(key, (*path, "key"), tensor, inner), item] for key, item in encoded]}


def _checked(text: str, path: tuple[str, ...]) -> str:
    """The string, if it has a form in UTF-8, as JSON needs it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedState(
            f"The state at {'.'.join(path) or 'its top'!r} is a string that UTF-8 can't hold: {error.reason}. "
            "Store it as bytes, as os.fsencode returns them for the name of a file."
        ) from error
    return text


def _decode_tagged(tag: str, value: Json, tensors: Mapping[str, Any]) -> Any:
    try:
        match tag:
            case "$tensor":
                return tensors[value]
            case "$small_tensor":
                dtype, shape, data = value
                return _small_tensor(dtype, shape, base64.b64decode(data, validate=True))
            case "$array":
                dtype, shape, data = value
                return np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(shape).copy()
            case "$float":
                return float(value)
            case "$bytes":
                return base64.b64decode(value, validate=True)
            case "$tuple":
                return tuple(join(item, tensors) for item in value)
            case "$items":
                return {join(key, tensors): join(item, tensors) for key, item in value}
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptCheckpoint(f"The checkpoint's state has a {tag} that can't be read: {error}.") from error
    raise CorruptCheckpoint(f"The checkpoint's state has a value of the unknown type {tag!r}.")


def is_plain(tensor: object) -> bool:
    """Whether shape, dtype and bytes are all that there is to a tensor."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and (tensor.layout, tensor.is_nested, tensor.is_meta) == (torch.strided, False, False)
        and tensor.dtype in DTYPES.values()
    )


def _small_tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is not a dtype that tensors can have")
    kind = DTYPES[dtype]
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    tensor = flat.reshape(shape)
    if list(tensor.shape) != shape:  # it held a -1, which torch has replaced
        raise ValueError(f"{shape!r} is not a valid shape")
    return tensor


def _small(tensor: torch.Tensor) -> Json:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"$small_tensor": [dtype, list(tensor.shape), base64.b64encode(data).decode()]}


def _unsupported(path: tuple[str, ...], value: object) -> UnsupportedState:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        kind += f" ({value.dtype}, {value.layout}, on {value.device})"
    return UnsupportedState(
        f"The state at {'.'.join(path) or 'its top'!r} is a {kind}, which can't be stored without pickle. "
        "Turn it into plain tensors, numbers, strings, lists or dicts first."
    )
