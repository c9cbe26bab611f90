"""What is known of a model: from its config.json, and as people write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_configs import GPT2, LLAMA2_7B, MISTRAL_7B
from spottrain_cli.api_access import UserError
from spottrain_cli.model_facts import count, of_config, read_config, size


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(GPT2, 124_439_808, id="GPT-2"),
        pytest.param(LLAMA2_7B, 6_738_415_616, id="Llama 2 7B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, id="Mistral 7B"),
    ],
)
def test_parameters_are_counted_as_published(config: dict[str, Any], parameters: int) -> None:
    facts = of_config(config, "config.json")
    assert facts.num_parameters == pytest.approx(parameters, rel=0.001)
    assert facts.vocabulary == config["vocab_size"]


def test_fields_of_a_config_that_are_null_count_as_absent(tmp_path: Path) -> None:
    (tmp_path / "nulls.json").write_text(json.dumps({**LLAMA2_7B, "text_config": None, "n_positions": None}))
    assert read_config(tmp_path / "nulls.json") == of_config(LLAMA2_7B, "config.json")


@pytest.mark.parametrize("text", ["[1, 2]", '{"text_config": [1, 2]}'])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(text)
    sentence = r"list\.json does not hold a JSON object\. Give the config\.json of the model\."
    with pytest.raises(UserError, match=sentence):
        read_config(tmp_path / "list.json")


def test_a_config_that_says_too_little_is_refused() -> None:
    with pytest.raises(UserError, match=r"an encoder and a decoder, .* Give --parameters"):
        of_config({"d_model": 512, "is_encoder_decoder": True}, "config.json")
    with pytest.raises(UserError, match=r"config.json has no num_hidden_layers. Give --parameters instead"):
        of_config({"hidden_size": 8}, "config.json")
    with pytest.raises(UserError, match=r"config.json has no n_positions. Give --parameters instead"):
        of_config({**GPT2, "n_positions": "1024"}, "config.json")


@pytest.mark.parametrize(
    ("text", "value"), [("7B", 7e9), ("1.3e9", 1.3e9), ("350m", 350e6), ("124439808", 124439808), ("2T", 2e12)]
)
def test_counts_are_read(text: str, value: float) -> None:
    assert count(text) == value


@pytest.mark.parametrize(("text", "value"), [("80GiB", 80 << 30), ("24Gi", 24 << 30), ("16 GB", 16 * 10**9)])
def test_sizes_are_read(text: str, value: int) -> None:
    assert size(text) == value
