"""A command line that doesn't understand all that is stored.

It is older than the operator, or something is damaged. It shows what it understands of the job, and names the rest.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from click.testing import CliRunner

from answering_server import answering_server
from spottrain_cli.main import main

AT = "2026-01-01T00:00:00Z"
MEMBER = {"pod": "gpt-1", "podUid": "u", "address": "127.1.0.2", "node": "n", "nodeRank": 0, "capacityType": "spot"}
GENERATION = {
    **{"number": 3, "state": "Active", "rendezvousID": "r", "rendezvousEndpoint": "127.1.0.2:1", "worldSize": 1},
    **{"members": [MEMBER], "startedAt": AT},
}
STATUS: dict[str, Any] = {
    "phase": "Running",
    "message": "1 member trains.",
    "generation": GENERATION,
    "progress": {"step": 30, "totalSteps": 100, "display": "30/100"},
    "quota": {"used": 3},
}


def pod(name: str, uid: str) -> dict[str, Any]:
    """A pod of the job gpt with this uid."""
    labels = {"spottrain.dev/job": "gpt", "spottrain.dev/job-uid": uid, "spottrain.dev/capacity-type": "reserved"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running"},
    }


# What a terminal takes as commands: a title, an empty screen, a color by a C1 character, text from the right.
HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\u202e"
EVENTS = [
    {
        "metadata": {"name": "gpt.1", "creationTimestamp": AT},
        "involvedObject": {},
        **{"type": "Warning", "reason": f"A{HOSTILE}", "message": f"It said{HOSTILE}", "lastTimestamp": AT},
    }
]
PODS = [pod("gpt-1", "1"), pod("gpt-9", "0")]
Show = Callable[..., str]


def has_labels(pod: dict[str, Any], query: dict[str, list[str]]) -> bool:
    wanted = dict(label.split("=") for label in query["labelSelector"][0].split(","))
    labels: dict[str, str] = pod["metadata"]["labels"]
    return wanted.items() <= labels.items()


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """What a command says of the job gpt with this status.

    An API server on loopback holds the job.
    """
    job: dict[str, Any] = {
        "metadata": {"namespace": "default", "name": "gpt", "uid": "1", "creationTimestamp": AT},
        "spec": {"batch": {"global": 8}},
    }

    def answers(url: str) -> tuple[int, dict[str, Any]]:
        path, _, query = url.partition("?")
        if path.endswith("/trainingjobhistories/gpt"):
            owned = {"metadata": {"ownerReferences": [{"uid": job["history_of"]}]}, "csv": job["history"]}
            return 404 if job["history"] is None else 200, owned
        if path.endswith("/trainingjobs"):
            return 200, {"items": [job]}
        if path.endswith("/events"):
            return 200, {"items": EVENTS}
        if path.endswith("/pods"):
            return 200, {"items": [each for each in PODS if has_labels(each, parse_qs(query))]}
        return 200, job

    def run(
        *command: str, history: str | None = None, history_of: str = "1", exit_code: int = 0, **status: object
    ) -> str:
        job["status"], job["history"], job["history_of"] = STATUS | status, history, history_of
        runner = CliRunner(env={"COLUMNS": "200"})
        with answering_server(tmp_path, answers) as kubeconfig:
            result = runner.invoke(main, [*command, "--kubeconfig", str(kubeconfig)], catch_exceptions=False)
        assert result.exit_code == exit_code, result.output
        return result.output

    return run


def test_fields_that_are_unknown_disturb_nothing(show: Show) -> None:
    output = show("status", "gpt")
    assert "default/gpt  Running" in output
    assert "1 member trains." in output
    assert "does not understand" not in output
    assert "reserved" in output, "the pod's capacity type is shown, though it is unknown"


def test_the_pods_of_an_earlier_job_of_that_name_are_left_out(show: Show) -> None:
    output = show("status", "gpt")
    assert "gpt-1" in output
    assert "gpt-9" not in output


@pytest.mark.parametrize(
    ("newer", "shown", "field"),
    [
        ({"phase": "Hibernating"}, ("default/gpt  Unknown", "30/100", "generation 3, Active"), "status.phase"),
        (
            {"generation": GENERATION | {"state": "Hibernating"}},
            ("default/gpt  Running", "30/100", "generation unknown"),
            "status.generation.state",
        ),
        (
            {"transitions": [{"generation": 2, "reason": "Grow", "at": "noon"}]},
            ("default/gpt  Running", "30/100", "generation 3, Active"),
            "status.transitions[0].at",
        ),
    ],
    ids=["phase", "generation", "transitions"],
)
def test_what_is_understood_is_shown_and_the_rest_named(
    newer: dict[str, Any], shown: tuple[str, ...], field: str, show: Show
) -> None:
    output = show("status", "gpt", **newer)
    assert [text for text in shown if text not in output] == []
    assert f"This version of spottrain does not understand {field}, which a newer operator may have written" in output


def test_no_text_of_a_job_commands_the_terminal(show: Show) -> None:
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "activations", "working", "total", "available"), 1
    )
    newer = {
        "message": HOSTILE,
        "generation": GENERATION | {"members": [MEMBER | {"pod": HOSTILE, "node": HOSTILE}]},
        "progress": {"step": 3, "display": HOSTILE, "message": HOSTILE, "checkpointInterval": HOSTILE},
        "strategy": {"strategy": "ddp", "name": HOSTILE, "reason": HOSTILE, "memory": memory},
        "conditions": [
            {
                **{"type": "CheckpointsHealthy", "status": "False", "lastTransitionTime": AT},
                **{"reason": HOSTILE, "message": HOSTILE},
            }
        ],
        "cost": {"total": 1, "onDemandOnly": 1, "currency": HOSTILE, "display": HOSTILE},
        "goodputDisplay": HOSTILE,
        "transitions": [{HOSTILE: 1}],
    }
    ended = {"phase": "Succeeded", "generation": None, "message": HOSTILE}
    for said in (show("status", "gpt", **newer), show("status", **newer), show("logs", "gpt", **ended)):
        assert "]0;mine" in said
        assert [each for each in said if not each.isprintable() and each != "\n"] == []
    assert show("status", "gpt", **newer).count("]0;mine") >= 11


def test_a_generation_of_members_of_a_newer_kind_has_no_logs_to_show(show: Show) -> None:
    newer = {"generation": GENERATION | {"members": [MEMBER | {"capacityType": "reserved"}]}}
    assert "does not understand the members of generation 3" in show("logs", "gpt", exit_code=1, **newer)


def test_jobs_are_listed(show: Show) -> None:
    line = show("status", phase="Hibernating").splitlines()[1].split()
    assert line[:3] == ["gpt", "Unknown", "30/100"]


def test_a_report_is_written(show: Show, tmp_path: Path) -> None:
    page = tmp_path / "gpt.html"
    show("report", "gpt", "--output", str(page), phase="Hibernating")
    assert "Unknown · namespace default" in page.read_text(encoding="utf-8")
    assert "does not understand status.phase" in page.read_text(encoding="utf-8")


def test_a_report_is_in_utf_8_as_it_says_whatever_the_locale(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "ascii")
    page = tmp_path / "gpt.html"
    show("report", "gpt", "--output", str(page))
    assert "gpt · spottrain report".encode() in page.read_bytes()


@pytest.mark.parametrize(
    ("output", "problem"),
    [("nowhere/gpt.html", "No such file or directory"), ("/dev/full", "No space left on device")],
)
def test_a_report_that_cannot_be_written_is_named_with_what_to_do(
    output: str, problem: str, show: Show, tmp_path: Path
) -> None:
    path = tmp_path / output
    said = " ".join(show("report", "gpt", "--output", str(path), exit_code=1).split())
    assert f"{path} cannot be written: {problem}. Name another file with --output." in said


def test_the_history_of_an_earlier_job_of_that_name_is_left_out(show: Show, tmp_path: Path) -> None:
    page = tmp_path / "gpt.html"
    rows = "1767225600,1,2.0,3.0,1,1,1,0,Running\n1767225601,2,2.0,3.0,1,1,1,0,Running\n"
    show("report", "gpt", "--output", str(page), history=rows)
    assert "<svg" in page.read_text()
    show("report", "gpt", "--output", str(page), history=rows, history_of="9")
    assert "<svg" not in page.read_text()


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ("1,2\n", "a point of the history has 9 cells, not 2"),
        ("noon,1,2.0,3.0,1,1,1,0,Running\n", "noon"),
        ("1\r2\n", "new-line"),
    ],
)
def test_a_history_that_is_damaged_is_named_with_what_to_do(
    history: str, problem: str, show: Show, tmp_path: Path
) -> None:
    output = show("report", "gpt", "--output", str(tmp_path / "gpt.html"), history=history, exit_code=1)
    assert problem in output
    assert "`kubectl delete trainingjobhistories gpt -n default` deletes it" in " ".join(output.split())
