"""What `spottrain` says if its cluster is away, fails or refuses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import CliRunner, Result
from kubernetes.config import kube_config

from answering_server import Answers, answering_server
from spottrain_cli import api_access, job_view
from spottrain_cli.api_access import NotThere, Unanswered, UserError
from spottrain_cli.job_view import JobReader
from spottrain_cli.main import main

# Requests that are never answered end after it, if the client does not end them.
PATIENCE_SECONDS = 10.0

JOB: dict[str, Any] = {
    "metadata": {"namespace": "default", "name": "gpt", "uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"batch": {"global": 8}},
}

# With the data of a certificate.
KUBECONFIG = b"""
clusters: [{name: c, cluster: {server: "https://127.0.0.1", certificate-authority-data: "%b"}}]
contexts: [{name: c, context: {cluster: c, user: c}}]
users: [{name: c, user: {}}]
current-context: c
"""


def answer(path: str, phase: str = "Running") -> tuple[int, dict[str, Any]]:
    """What an API server says that has the job gpt in this phase, without pods."""
    job = JOB | {"status": {"phase": phase}}
    return 200, job if path.endswith("/gpt") else {"items": []}


def spottrain(
    folder: Path, answers: Answers, *command: str, charset: str = "utf-8", namespace: str | None = None
) -> Result:
    """The result of a command at an API server with these answers.

    `namespace` is that of the kubeconfig's context.
    """
    runner = CliRunner(env={"COLUMNS": "300"}, charset=charset)
    with answering_server(folder, answers, namespace=namespace) as kubeconfig:
        return runner.invoke(main, [*command, "--kubeconfig", str(kubeconfig)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No configuration found"),
        (b"a: b", "Expected key current-context in {}"),
        (b"text", "It holds no kubeconfig"),
        (b"[a, b]", "It holds no kubeconfig"),
        (b"a: [b", "while parsing a flow sequence"),
        (b"a: \xff", "invalid start byte"),
        (KUBECONFIG % b"not base64", "base64"),
        ("folder", "Is a directory"),
    ],
    ids=["missing", "of no kind", "text", "list", "no YAML", "not UTF-8", "no base64", "folder"],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | str | None, reason: str) -> None:
    path = tmp_path / "config"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(UserError) as refused:
        JobReader(str(path))
    said = str(refused.value)
    assert said.startswith(f"No cluster to talk to: kubeconfig {path}: "), said
    assert reason.format(path) in said
    assert said.endswith(". Set KUBECONFIG, or start a cluster with `spottrain local up`.")
    assert "\n" not in said


def test_an_empty_kubeconfig_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "")  # as an import with that variable sets it
    with pytest.raises(UserError, match=r"kubeconfig ~/\.kube/config: No configuration found"):
        JobReader()


@pytest.mark.parametrize("files", ["named:other", "named:empty", "empty:named:other"])
def test_the_first_kubeconfig_that_names_a_context_chooses_the_cluster(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kubectl does it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", files)
    paths: list[str] = []

    def notes(path: str) -> tuple[int, dict[str, Any]]:
        paths.append(path)
        return answer(path)

    with answering_server(tmp_path, notes, namespace="team-a") as kubeconfig:
        kubeconfig.rename("named")
        context = "contexts: [{name: o, context: {cluster: c, namespace: other}}]"
        Path("other").write_text(f"{context}\ncurrent-context: o")
        Path("empty").write_text(f"{context}\ncurrent-context: ''")
        reader = JobReader()
        reader.jobs(reader.namespace)
    assert reader.namespace == "team-a"
    assert "/namespaces/team-a/" in paths[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_cluster_on_this_machine_needs_no_proxy_of_the_environment(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for kubectl. A proxy that the kubeconfig names is asked, as for a tunnel."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering_server(tmp_path, answer) as kubeconfig:
        content = yaml.safe_load(kubeconfig.read_text().replace("127.0.0.1", host))
        kubeconfig.write_text(yaml.safe_dump(content))
        assert JobReader(str(kubeconfig)).jobs(None) == []
        content["clusters"][0]["cluster"]["proxy-url"] = "http://127.0.0.1:10"
        kubeconfig.write_text(yaml.safe_dump(content))
        with pytest.raises(Unanswered, match="proxy"):
            JobReader(str(kubeconfig)).jobs(None)


@pytest.mark.parametrize("command", [("status", "gpt", "--watch"), ("logs", "gpt")], ids=["status", "logs"])
def test_a_job_is_watched_over_an_outage_of_the_api_server(command: tuple[str, ...], tmp_path: Path) -> None:
    asked: list[str] = []

    def fails_in_between(path: str) -> tuple[int, dict[str, Any]]:
        asked.extend(["job"] if path.endswith("/gpt") else [])
        if len(asked) in (2, 3):
            return 503, {"message": "the leader of etcd changes"}
        return answer(path, "Running" if len(asked) < 5 else "Succeeded")

    result = spottrain(tmp_path, fails_in_between, *command)
    assert result.exit_code == 0
    assert result.output.count("can't answer now: the leader of etcd changes (503)") == 1
    assert result.output.count("Trying again for 60 s.") == 1


@pytest.mark.parametrize(
    ("silent", "command"),
    [
        ("/trainingjobs", "status -A"),
        ("/trainingjobs", "status"),
        ("/gpt", "logs gpt"),
        ("/pods", "status gpt"),
        ("/events", "status gpt"),
        ("/trainingjobhistories/gpt", "report gpt"),
    ],
)
def test_an_api_server_that_is_silent_does_not_answer(
    silent: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "READ_SECONDS", 0.2)
    ended = threading.Event()

    def says_nothing(url: str) -> tuple[int, dict[str, Any]]:
        path = urlsplit(url).path
        if path.endswith(silent):
            ended.wait(PATIENCE_SECONDS)
        return answer(path, "Succeeded")

    try:
        result = spottrain(tmp_path, says_nothing, *command.split())
    finally:
        ended.set()
    assert result.exit_code == 1
    assert "The API server does not answer (" in result.output
    assert "Check that the cluster runs" in result.output


def test_a_log_may_be_silent_for_longer_than_an_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "READ_SECONDS", 0.2)
    asked, other_timed_out = threading.Event(), threading.Event()

    def says_nothing(url: str) -> tuple[int, dict[str, Any] | str]:
        asked.set()
        assert other_timed_out.wait(PATIENCE_SECONDS)
        return (200, "2026-01-01T00:00:01Z step 1\n") if "/log" in url else answer(url)

    with answering_server(tmp_path, says_nothing) as kubeconfig, ThreadPoolExecutor() as pool:
        log = pool.submit(lambda: [*JobReader(str(kubeconfig)).log_lines("default", "gpt-1", None)])
        assert asked.wait(PATIENCE_SECONDS)
        with pytest.raises(Unanswered):
            JobReader(str(kubeconfig)).jobs(None)
        other_timed_out.set()
        [(_, line)] = log.result()
    assert line == "step 1"


@pytest.mark.parametrize(
    ("command", "empty"),
    [(("status", ""), "[JOB]"), (("logs", ""), "JOB"), (("report", ""), "JOB"), (("status", "-n", ""), "-n")],
    ids=["status", "logs", "report", "namespace"],
)
def test_an_empty_name_is_refused(command: tuple[str, ...], empty: str, tmp_path: Path) -> None:
    result = spottrain(tmp_path, answer, *command)
    assert result.exit_code == 2
    assert f"Invalid value for '{empty}" in result.output
    assert "It is empty. Is a variable not set?" in result.output


@pytest.mark.parametrize("command", ["status", "status gpt", "status gpt --watch", "logs gpt", "report gpt"])
@pytest.mark.parametrize(
    ("context", "option", "asked"),
    [(None, "", "default"), ("", "", "default"), ("team-a", "", "team-a"), ("team-a", "-n default", "default")],
    ids=["none", "empty", "context", "option"],
)
def test_the_namespace_is_that_of_the_context_unless_one_is_named(
    command: str, context: str | None, option: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the report
    paths: list[str] = []

    def notes(path: str) -> tuple[int, dict[str, Any]]:
        paths.append(path)
        return answer(path, "Succeeded")

    result = spottrain(tmp_path, notes, *command.split(), *option.split(), namespace=context)
    assert result.exit_code == 0, result.output
    assert f"/namespaces/{asked}/trainingjobs" in paths[0]


@pytest.mark.parametrize("command", [("status", "gpt"), ("logs", "gpt")], ids=["status", "logs"])
def test_a_terminal_that_is_not_utf_8_shows_what_it_can(command: tuple[str, ...], tmp_path: Path) -> None:
    done = JOB | {"status": {"phase": "Succeeded", "message": "gelöst ✓"}}
    result = spottrain(
        tmp_path, lambda path: (200, done) if path.endswith("/gpt") else answer(path), *command, charset="latin-1"
    )
    assert result.exit_code == 0
    assert "gelöst ?" in result.output


@pytest.mark.parametrize("command", [("status", "gpt", "--watch"), ("logs", "gpt")], ids=["status", "logs"])
def test_the_exit_code_distinguishes_a_failed_job_from_a_failed_command(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    assert spottrain(tmp_path, lambda path: answer(path, "Failed"), *command).exit_code == 3
    refused = spottrain(tmp_path, lambda _: (503, {}), *command)
    assert (refused.exit_code, refused.output.count("Trying again")) == (1, 0), refused.output


def test_an_outage_that_lasts_and_a_refusal_end_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_access, "OUTAGE_SECONDS", 0.0)
    for error, remarks in ((Unanswered("It is gone."), ["It is gone. Trying again for 0 s."]), (NotThere("No."), [])):
        said: list[str] = []
        given: Iterator[str | UserError] = itertools.chain(["here"], itertools.repeat(error))

        def read(given: Iterator[str | UserError] = given) -> str:
            if isinstance(found := next(given), UserError):
                raise found
            return found

        watched = api_access.answers(read, every=0.0, remark=said.append)
        assert next(watched) == "here"
        with pytest.raises(type(error)):
            next(watched)
        assert said == remarks


def test_a_log_is_read_on_from_a_time_of_the_clusters_clock(tmp_path: Path) -> None:
    asked: list[dict[str, list[str]]] = []

    def log(url: str) -> tuple[int, str]:
        asked.append(parse_qs(urlsplit(url).query))
        return 200, "2026-01-01T01:00:07.123456789+01:00 step 7\n"

    with answering_server(tmp_path, log) as kubeconfig:
        [(at, line)] = JobReader(str(kubeconfig)).log_lines("default", "gpt-1", None)
        [*JobReader(str(kubeconfig)).log_lines("default", "gpt-1", at)]
    assert line == "step 7"
    wanted = {"container": ["trainer"], "follow": ["true"], "timestamps": ["true"]}
    assert asked == [wanted, wanted | {"sinceTime": ["2026-01-01T01:00:07+01:00"]}]


def test_the_last_line_of_a_log_needs_no_line_break(tmp_path: Path) -> None:
    said = "2026-01-01T00:00:01Z step 1\n2026-01-01T00:00:02Z out of memory"
    with answering_server(tmp_path, lambda _: (200, said)) as kubeconfig:
        lines = [line for _, line in JobReader(str(kubeconfig)).log_lines("default", "gpt-1", None)]
    assert lines == ["step 1", "out of memory"]


def test_what_the_kubelet_says_in_place_of_a_log_is_an_error(tmp_path: Path) -> None:
    said = "unable to retrieve container logs for containerd://1"
    with (
        answering_server(tmp_path, lambda _: (200, said)) as kubeconfig,
        pytest.raises(UserError, match=f"The log of gpt-1 can't be read now: {said}"),
    ):
        next(JobReader(str(kubeconfig)).log_lines("default", "gpt-1", None))


def test_what_the_user_may_not_read_is_named_and_the_job_is_shown(tmp_path: Path) -> None:
    def forbids(path: str) -> tuple[int, dict[str, Any]]:
        job = "/trainingjobs/gpt"
        return answer(path) if path.endswith(job) else (403, {"message": "forbidden"})

    result = spottrain(tmp_path, forbids, "status", "gpt")
    assert result.exit_code == 0
    assert "default/gpt  Running" in result.output
    assert "You may not read the job's pods, events, history. `kubectl auth can-i --list -n default`" in result.output


def test_a_refusal_says_what_the_api_server_said(tmp_path: Path) -> None:
    message = 'trainingjobs.spottrain.dev "gpt" is forbidden: User "ann" cannot get resource "trainingjobs"'
    result = spottrain(tmp_path, lambda _: (403, {"message": message}), "status", "gpt")
    assert result.exit_code == 1
    assert f"{message} (403)" in result.output


def test_a_cluster_without_the_chart_is_named(tmp_path: Path) -> None:
    result = spottrain(tmp_path, lambda _: (404, "404 page not found"), "status")
    assert result.exit_code == 1
    assert "The cluster does not know TrainingJobs: the chart is not installed" in result.output


@pytest.mark.parametrize("command", [("status",), ("status", "gpt"), ("logs", "gpt")], ids=" ".join)
def test_a_page_in_place_of_an_object_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    result = spottrain(tmp_path, lambda _: (200, "<html>Log in</html>"), *command)
    assert result.exit_code == 1
    assert "answers with a page in place of an object" in result.output
