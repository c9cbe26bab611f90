"""What a commit holds about a PEFT model. By it, an export writes the model's adapters as PEFT would."""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import nn

from spottrain.engines.model_state import unwrapped

# Prefix of an adapter's tensor names if transformers has put the adapter into its model without a PeftModel.
_PREFIX = "base_model.model."


def peft_adapters(model: nn.Module) -> dict[str, Any] | None:
    """Describe the adapters of a model. May ask the hub for the base model's configuration, as PEFT does.

    Args:
        model: The model before it is spread.

    Returns:
        For each adapter, by name: `config`, as in adapter_config.json, and `tensors`, which maps names in
        adapter_model.safetensors to names in a commit's model. `tensors` is None if PEFT computes an adapter's
        tensors from others. None for a model without adapters.
    """
    if not getattr(model, "peft_config", None):
        return None
    from peft import PeftModel, get_peft_model_state_dict

    # The script may have compiled it. A PeftModel would pass getattr on to the model inside.
    model = dict(model.named_children()).get("_orig_mod", model)
    is_peft_model = isinstance(model, PeftModel)
    state = model.state_dict()
    names = {id(value): unwrapped(name) for name, value in state.items()}
    adapters = {}
    for adapter, its_config in model.peft_config.items():  # type: ignore[union-attr, operator]
        config = copy.deepcopy(its_config)
        config.inference_mode = True
        base = model.get_base_model() if is_peft_model else model  # type: ignore[operator]
        config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        if config.task_type is None:
            config.auto_mapping = {
                "base_model_class": type(base).__name__,
                "parent_library": type(base).__module__,
            }
        found = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
        prefix = "" if is_peft_model else _PREFIX
        tensors = {f"{prefix}{unwrapped(name)}": names.get(id(value)) for name, value in found.items()}
        adapters[adapter] = {
            "config": json.loads(json.dumps(config.to_dict(), default=list)),  # sets are lists there
            "tensors": tensors if all(tensors.values()) else None,
        }
    return adapters
