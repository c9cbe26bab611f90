"""What is inside the wrappers in which torch.compile, Accelerate and Fabric return what they were given."""

from __future__ import annotations

from typing import Any

_FRAMEWORKS = ("accelerate.", "lightning.fabric.", "lightning_fabric.")
_WRAPPED = ("_forward_module", "optimizer", "scheduler")


def inside(value: Any) -> Any:
    """The model, optimizer or schedule of torch's in such a wrapper, or `value` itself.

    An optimizer of the script's around another one stays: it has a state of its own.
    """
    value = getattr(value, "_orig_mod", value)  # of torch.compile
    if not any(kind.__module__.startswith(_FRAMEWORKS) for kind in type(value).__mro__):
        return value
    name = next((name for name in _WRAPPED if hasattr(value, name)), None)
    return inside(getattr(value, name)) if name is not None else value
