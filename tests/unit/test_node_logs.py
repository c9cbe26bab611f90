"""Log options, and reading a container's log as `kubectl logs` wants it.

The node's configuration is here, too.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from spottrain_local.node.config import ConfigError, load_config
from spottrain_local.node.containers import ContainerRecord, ContainerRun, PodSandbox, Running, Terminated, Waiting
from spottrain_local.node.log_server import LogReader, log_number, parse_log_options, render, select_tail
from spottrain_local.node.shim import LogFile
from spottrain_local.node.termination_message import termination_message

NOW = datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)
ENDED = Terminated(exit_code=1, reason="Error")
RUNNING = Running(started_at="")
BACKOFF = Waiting(reason="CrashLoopBackOff")
LINE = b"2026-01-01T00:00:05.123456789Z stdout F hello\n"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, b"hello\n"),
        ({"timestamps": "true"}, b"2026-01-01T00:00:05.123456789Z hello\n"),
        ({"sinceSeconds": "5"}, b"hello\n"),
        ({"sinceSeconds": "4"}, b""),
        ({"sinceTime": "2026-01-01T00:00:06Z"}, b""),
        ({"sinceTime": "2026-01-01T01:00:05+01:00"}, b"hello\n"),
        ({"sinceTime": "2020-01-01T00:00:00"}, b"hello\n"),
    ],
)
def test_lines_are_shown_as_asked(query: dict[str, Any], expected: bytes) -> None:
    assert render(LINE, parse_log_options(query, NOW)) == expected


def test_a_partial_record_is_joined_with_the_next() -> None:
    options = parse_log_options({}, NOW)
    assert render(LINE.replace(b" F ", b" P "), options) + render(LINE, options) == b"hellohello\n"


def test_bad_options_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="log options are invalid"):
        parse_log_options({"tailLines": "many"}, NOW)


@pytest.mark.parametrize(("lines", "expected"), [(None, 4), (0, 0), (1, 1), (2, 3), (9, 4)])
def test_tail_counts_whole_lines(lines: int | None, expected: int) -> None:
    partial = LINE.replace(b" F ", b" P ")
    assert len(select_tail([LINE, partial, LINE, LINE], lines)) == expected


def test_a_reader_follows_a_log_through_rotation(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 1000)
    log.write(b"first\n")
    reader = LogReader(tmp_path / "log")
    records = reader.everything()
    for number in range(30):
        log.write(b"line %d\n" % number)
        records += reader.more()
    assert [r.split(b" ", 3)[3] for r in records] == [b"first\n", *(b"line %d\n" % n for n in range(30))]
    reader.close()


def record(state: Any, count: int = 0, last: Terminated | None = None) -> ContainerRecord:
    return ContainerRecord(name="c", image="i", state=state, restart_count=count, last=last)


@pytest.mark.parametrize(
    ("found", "previous", "number"),
    [
        pytest.param(record(RUNNING), False, 0, id="running"),
        pytest.param(record(RUNNING, 2, ENDED), True, 1, id="previous-of-running"),
        pytest.param(record(BACKOFF, 2, ENDED), False, 2, id="waiting-shows-last"),
        pytest.param(record(BACKOFF, 2, ENDED), True, 2, id="previous-of-waiting"),
        pytest.param(record(ENDED), False, 0, id="ended"),
    ],
)
def test_which_run_is_shown(found: ContainerRecord, previous: bool, number: int) -> None:
    assert log_number(found, previous) == number


@pytest.mark.parametrize(
    ("found", "previous", "sentence"),
    [
        (record(Waiting(reason="ContainerCreating")), False, 'container "c" is waiting to start: ContainerCreating'),
        (record(RUNNING), True, 'previous terminated container "c" not found'),
    ],
)
def test_a_log_that_is_not_there_is_explained(found: ContainerRecord, previous: bool, sentence: str) -> None:
    with pytest.raises(LookupError, match=sentence):
        log_number(found, previous)


@pytest.mark.parametrize(
    ("policy", "written", "expected"),
    [
        ("File", "said", "said"),
        ("File", "", ""),
        ("FallbackToLogsOnError", "", "a\nb"),
        ("FallbackToLogsOnError", "x", "x"),
    ],
)
def test_termination_message(tmp_path: Path, policy: str, written: str, expected: str) -> None:
    LogFile(str(tmp_path / "0.log"), 1000).write(b"a\nb\n")
    if written:
        (tmp_path / "termination").write_text(written)
    pod = PodSandbox(uid="u", namespace="n", hostname="p", ip="", host_network=False, directory=tmp_path)
    run = ContainerRun(
        pod=pod,
        name="c",
        image="none",
        env={},
        log_path=tmp_path / "0.log",
        directory=tmp_path / "0",
        container_id="",
    )
    assert termination_message({"terminationMessagePolicy": policy}, run, ENDED) == expected


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        (json.dumps({"name": "n"}), "provider: Field required"),
        (json.dumps({"nmae": "n"}), "nmae: Extra inputs are not permitted"),  # codespell:ignore nmae
    ],
)
def test_a_wrong_configuration_is_explained(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "node.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)
