"""The operator's hidden setting of timings, for tests and rehearsals."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.options import timing_option


@click.command()
@timing_option
def show(timing: Timing) -> None:
    click.echo(f"{timing.growth_interval} {timing.max_start_failures} {timing == DEFAULT_TIMING}")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        pytest.param({}, "20.0 3 True", id="nothing"),
        pytest.param({"SPOTTRAIN_TIMING": '{"growth_interval": 4}'}, "4 3 False", id="a duration"),
        pytest.param({"SPOTTRAIN_TIMING": '{"max_start_failures": 2}'}, "20.0 2 False", id="a number of times"),
    ],
)
def test_what_is_given_differs_from_the_defaults(given: dict[str, str], shown: str) -> None:
    assert CliRunner().invoke(show, env=given).output.strip() == shown


@pytest.mark.parametrize(
    "text",
    ["growth_interval=4", "[4]", '{"growth": 4}', '{"growth_interval": 0}', '{"max_start_failures": 1.5}'],
)
def test_anything_else_is_refused(text: str) -> None:
    refused = CliRunner().invoke(show, env={"SPOTTRAIN_TIMING": text})
    assert refused.exit_code == 2
    assert "is not a JSON object of fields of Timing" in refused.output


def test_help_does_not_show_it() -> None:
    assert "timing" not in CliRunner().invoke(show, ["--help"]).output
