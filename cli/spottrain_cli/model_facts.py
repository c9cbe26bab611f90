"""Facts about a model that the user gives.

They are sizes with units, and a Hugging Face config.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spottrain_cli.api_access import UserError
from spottrain_planner.memory_estimate import ModelFacts

_COUNT_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTE_UNITS = {
    **{"": 1, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40},
    **{"mb": 10**6, "gb": 10**9, "tb": 10**12, "m": 10**6, "g": 10**9, "t": 10**12},
}
# Models whose feed-forward part has one more matrix in each layer.
_GATED = re.compile(r"silu|swiglu|geglu|gated")
_GATED_TYPES = re.compile(r"^(llama|mistral|mixtral|qwen|gemma|phi3|deepseek|olmo|cohere|granite)")


def count(text: str) -> int:
    """Parse a number of parameters: 7B, 350M, 124439808.

    Raises:
        UserError: The text is not a number with such a unit, or less than 1.
    """
    found = round(_measured(text, _COUNT_UNITS, "7B, 350M or 124439808"))
    if found < 1:
        raise UserError(f"{text!r} is less than one parameter. Give the unit, as in 7B.")
    return found


def size(text: str) -> int:
    """Parse a number of bytes: 80GiB, 80Gi, 80GB.

    Raises:
        UserError: The text is not a number with such a unit, or less than a MiB.
    """
    found = round(_measured(text, _BYTE_UNITS, "80GiB, 24Gi or 16GB"))
    if found < 1 << 20:
        raise UserError(f"{text!r} is less than a MiB. Give the unit, as in 80GiB.")
    return found


def _measured(text: str, units: Mapping[str, float], examples: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    measured = float(match[1]) * units.get(match[2], 0) if match is not None else 0.0
    if not 0 < measured < math.inf:
        raise UserError(f"{text!r} is not a size. Write it like {examples}.")
    return measured


def read_config(path: Path) -> ModelFacts:
    """Read the facts in the config.json of a Hugging Face transformer.

    Raises:
        UserError: The file is not such a config, or lacks a dimension.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. Give the config.json of the model.") from error
    if isinstance(config, dict):
        config = config.get("text_config") or config
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object. Give the config.json of the model.")
    return of_config(config, path.name)


def of_config(config: Mapping[str, Any], source: str) -> ModelFacts:
    """Count the parameters of a transformer from its dimensions.

    Biases are left out; most decoders have none.
    """

    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{source} describes an encoder and a decoder, which this command cannot count. Give --parameters."
        )

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"{source} has no {names[0]}. Give --parameters instead, and --hidden, --layers and --vocabulary if "
                "you know them."
            )
        return value

    hidden = number("hidden_size", "n_embd", "d_model", "dim")
    layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    vocabulary = number("vocab_size")
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads")
    head = number("head_dim", "d_kv", default=max(1, hidden // heads))
    keys = number("num_key_value_heads", default=heads)
    inner = number("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    says = f"{config.get('hidden_act')} {config.get('activation_function')} {config.get('feed_forward_proj')}"
    gated = _GATED.search(says) or _GATED_TYPES.match(str(config.get("model_type", "")))
    attention = hidden * head * (2 * heads + 2 * keys)
    feed_forward = (3 if gated else 2) * hidden * inner * experts
    positions = number("n_positions") if config.get("n_positions") else 0
    embeddings = (1 if config.get("tie_word_embeddings", True) else 2) * vocabulary + positions
    return ModelFacts(
        num_parameters=layers * (attention + feed_forward + 2 * hidden) + embeddings * hidden,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
    )
