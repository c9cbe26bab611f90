"""Log lines: text for people, JSON with what a line is about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from spottrain_runtime.logs import log_format

PROGRAM = """
    import asyncio, logging
    from spottrain_runtime import logs
    logs.configure("spottrain-agent")
    logs.remember(job="gpt", member="gpt-1", generation=None)
    logger = logging.getLogger("spottrain_agent.agent")
    logger.info("starts")
    logs.remember(generation=3)

    async def work(name):
        with logs.about(job=name):
            await asyncio.sleep(0)
            logger.warning("a line with\\nanother, a quote \\" and %s", "\\x1b[31m")

    async def main():
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(main())
    try:
        raise ValueError("no such column")
    except ValueError:
        logger.exception("it failed")
"""


def output_of(program: str, **environ: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


def test_json_lines_say_what_they_are_about() -> None:
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in output_of(PROGRAM, SPOTTRAIN_LOG_FORMAT="json").splitlines()
    ]
    assert [(line["job"], line["member"], line.get("generation")) for line in lines] == [
        ("gpt", "gpt-1", None),
        ("a", "gpt-1", 3),
        ("b", "gpt-1", 3),
        ("gpt", "gpt-1", 3),
    ]
    assert {line["program"] for line in lines} == {"spottrain-agent"}
    assert [line["level"] for line in lines] == ["INFO", "WARNING", "WARNING", "ERROR"]
    assert lines[1]["message"] == 'a line with\nanother, a quote " and \x1b[31m'
    assert "ValueError: no such column" in lines[3]["exc_info"]
    assert all(line["timestamp"] and line["logger"] == "spottrain_agent.agent" for line in lines)


def test_text_is_the_default() -> None:
    first = output_of(PROGRAM).splitlines()[0]
    assert first.endswith(" spottrain-agent INFO starts")


LIBRARY = """
    import logging
    from spottrain_runtime import logs
    logging.basicConfig(format="the script's own: %(message)s")
    logs.configure_library("spottrain")
    logger = logging.getLogger("spottrain.recovery")
    logger.warning("passed over")
    logs.say(logger, "resumed from step 3")
    logging.getLogger("mine").warning("mine")
"""


def test_the_library_leaves_the_scripts_logging_alone() -> None:
    assert output_of(LIBRARY).splitlines() == [
        "the script's own: passed over",
        "spottrain: resumed from step 3",
        "the script's own: mine",
    ]
    *ours, mine = output_of(LIBRARY, SPOTTRAIN_LOG_FORMAT="json").splitlines()
    assert [json.loads(line)["message"] for line in ours] == ["passed over", "resumed from step 3"]
    assert mine == "the script's own: mine"


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"SPOTTRAIN_LOG_FORMAT is 'xml'\. Set it to text or json\."):
        log_format({"SPOTTRAIN_LOG_FORMAT": "xml"})
