"""Networks, keys and child processes of the local cluster."""

import asyncio
import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster_fixtures import wait_for
from spottrain_local.address import claim_network, free_port
from spottrain_local.binaries import CONTROL_PLANE, HELM
from spottrain_local.cli import local
from spottrain_local.cluster import Cluster
from spottrain_local.install import install_operator
from spottrain_local.layout import (
    ClusterLayout,
    LocalClusterError,
    cluster_layout,
    clusters_root,
)
from spottrain_local.pki import open_authority
from spottrain_local.processes import ChildProcess, ProcessSpec
from spottrain_local.spec import DEFAULT_SPEC


def test_two_claims_get_different_networks() -> None:
    first = claim_network()
    second = claim_network(first.number)
    assert first.number != second.number
    first.release()
    third = claim_network(first.number)
    assert third.number == first.number
    second.release()
    third.release()


def test_a_port_that_a_server_has_on_all_addresses_is_not_free() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert free_port("127.200.1.1", port) != port


async def test_certificates_suit_the_strict_checks_of_newer_pythons(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, "ca")
    pair = authority.issue(tmp_path / "server", "server", addresses=["127.0.0.1"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    trust = ssl.create_default_context(cafile=str(authority.certificate_file))
    trust.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=trust)
        writer.close()


def test_keys_are_for_the_user_alone_and_an_authority_is_kept(tmp_path: Path) -> None:
    pair = open_authority(tmp_path, "ca").issue(tmp_path / "admin", "admin", organizations=["system:masters"])
    assert stat.S_IMODE(pair.key.stat().st_mode) == 0o600
    before = (tmp_path / "ca.crt").read_bytes()
    open_authority(tmp_path, "ca")
    assert (tmp_path / "ca.crt").read_bytes() == before


def test_an_installation_that_was_killed_does_not_keep_the_next_from_helm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the release that helm leaves is deleted first."""
    for name in ("kubectl", *CONTROL_PLANE, HELM):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/commands\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    layout = ClusterLayout(root=tmp_path)
    layout.spec.write_text(DEFAULT_SPEC.model_dump_json(by_alias=True))
    layout.address.write_text('{"network": 240}')
    install_operator(Cluster(layout=layout))
    delete, upgrade = (tmp_path / "commands").read_text().splitlines()
    assert delete == (
        "kubectl delete secret --namespace spottrain-system --selector"
        " owner=helm,name=spottrain,status in (pending-install,pending-upgrade,pending-rollback)"
    )
    assert upgrade.startswith("helm upgrade --install spottrain ")


async def test_a_process_that_ends_is_started_again(tmp_path: Path) -> None:
    spec = ProcessSpec(name="sleeper", argv=["sleep", "600"], log_file=tmp_path / "log")
    child = ChildProcess(spec)
    child.start()
    try:
        first = await _pid_other_than(child, None)
        os.kill(first, signal.SIGKILL)
        second = await _pid_other_than(child, first)
        assert second != first
    finally:
        await child.stop()
    assert child.pid is None
    assert not Path(f"/proc/{second}").exists()


async def test_a_process_that_can_not_be_started_is_started_later(tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    child = ChildProcess(ProcessSpec(name="sleeper", argv=[program, "600"], log_file=tmp_path / "log"))
    child.start()
    try:
        async with asyncio.timeout(10):
            while True:
                if child.restarts:
                    break
                await asyncio.sleep(0.01)
        assert child.pid is None
        program.symlink_to(shutil.which("sleep") or "")
        await _pid_other_than(child, None)
    finally:
        await child.stop()


async def _pid_other_than(child: ChildProcess, other: int | None) -> int:
    async with asyncio.timeout(10):
        while True:
            if child.pid not in (None, other):
                break
            await asyncio.sleep(0.01)
    assert child.pid
    return child.pid


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from spottrain_local.processes import ChildProcess, ProcessSpec, watch_children_by_pidfd

def work():
    # The parent's loop, with its open files, is on the stack below; this is a program of its own nevertheless.
    async def wait():
        end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
        print("waiting", flush=True)
        await end.wait()
    os.kill(os.getpid(), signal.SIGPIPE)  # a peer has hung up
    print("open", sorted(os.listdir("/proc/self/fd"), key=int)[3:], flush=True)
    asyncio.run(wait())
    print("ended in order", flush=True)
    return 7

async def main():
    log_file = Path(sys.argv[1])
    program = ProcessSpec(name="program", argv=["sleep", "600"], log_file=log_file)
    fork = ProcessSpec(name="fork", main=work, log_file=log_file)
    children = [ChildProcess(spec) for spec in (program, fork)]
    for child in children:
        child.start()
        while child.pid is None:
            await asyncio.sleep(0.01)
        print(child.pid, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for child in children:
        await child.stop()

watch_children_by_pidfd()
asyncio.run(main())
"""


@contextlib.contextmanager
def parent_of_two(log: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that keeps a program and a fork of its own, and their process ids."""
    command = [sys.executable, "-c", PARENT, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout
            yield parent, [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    with parent_of_two(tmp_path / "log") as (parent, children):
        parent.kill()
        for child in children:
            pidfd_gone(child)


def test_a_fork_is_a_program_of_its_own(tmp_path: Path) -> None:
    """A fork has nothing open of what its parent has, and has its own loop.

    It ends on SIGTERM as it wishes.
    """
    log = tmp_path / "log"
    with parent_of_two(log) as (parent, children):
        wait_for(lambda: "waiting" in log.read_text(), "the fork's loop runs", seconds=30)
        parent.communicate("\n", timeout=30)
        for child in children:
            pidfd_gone(child)
    # One descriptor is that of the listing itself.
    assert log.read_text().splitlines() == ["open ['3']", "waiting", "ended in order"]


def pidfd_gone(pid: int) -> None:
    """Wait until a process, not a child of this one, has ended."""

    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 5)[0], "the child outlived its parent"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["preempt", "spot-0", "--notice", "soon"], "'soon' is not a duration"),
        (["preempt", "spot-0"], "is not running. Start it with `spottrain local up`"),
        (["kill", "spot-0", "--name", "Nope!"], "is not a valid name of a cluster"),
        (["store", "--name", "absent"], "Start it with `spottrain local up --name absent`"),
        (["up", "--nodes", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["kubeconfig"], "is not running"),
    ],
)
def test_mistakes_at_the_command_line(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path))
    result = CliRunner().invoke(local, arguments)
    assert result.exit_code != 0
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({}, None),
        ({"http_proxy": "http://proxy:3128"}, "127.0.0.1"),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": ".corp, 10.0.0.1"}, "'127.0.0.1,.corp, 10.0.0.1'"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1"}, None),
    ],
    ids=["no proxy", "proxy", "others without", "already without"],
)
def test_the_store_is_reached_without_a_proxy(
    settings: dict[str, str], without: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy"):
        for each in (name, name.upper()):
            monkeypatch.delenv(each, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Cluster, "running_status", lambda _: {"store": {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}})
    lines = CliRunner().invoke(local, ["store"]).output.splitlines()
    assert lines == [
        "export AWS_ENDPOINT_URL_S3=http://127.0.0.1:1",
        *([f"export no_proxy={without}"] if without else []),
    ]


def test_down_of_what_does_not_run_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path))
    result = CliRunner().invoke(local, ["down"])
    assert result.exit_code == 0
    assert "was not running." in result.output


@pytest.mark.parametrize("name", ["address.json", "cluster.json"])
def test_state_that_can_not_be_read_is_reported_and_deleted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that lost power may leave an empty file."""
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path))
    root = cluster_layout("default").root
    root.mkdir()
    (root / "address.json").write_text('{"network": 240}')
    (root / "cluster.json").write_text(DEFAULT_SPEC.model_dump_json(by_alias=True))
    (root / name).write_text("")
    told = CliRunner().invoke(local, ["down"])
    assert isinstance(told.exception, SystemExit)
    assert "cannot be read. Delete it with `spottrain local down --delete`" in told.output
    assert CliRunner().invoke(local, ["down", "--delete"]).exit_code == 0
    assert not root.exists()


def test_a_user_without_a_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPOTTRAIN_LOCAL_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    told = CliRunner().invoke(local, ["status"])
    assert isinstance(told.exception, SystemExit)
    assert "This user has no home folder. Set HOME" in told.output


def test_state_of_another_user_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "open", refuse)
    told = CliRunner().invoke(local, ["down"])
    assert isinstance(told.exception, SystemExit)
    assert "belongs to another user" in told.output


def test_a_disk_that_is_full_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "supervisor.log").touch()  # its text has no room
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with subprocess.Popen(["false"]) as supervisor:
        supervisor.wait()
        with pytest.raises(LocalClusterError, match=r"did not start. .* can't be written: No space left on device"):
            Cluster(layout=ClusterLayout(root=tmp_path))._wait_for(["nodes"], supervisor, None, 0.0)


def test_a_folder_for_the_state_that_can_not_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = Cluster(layout=ClusterLayout(root=tmp_path / "file" / "default"))
    with pytest.raises(LocalClusterError, match=r"state cannot be written: .*/file/default'.* SPOTTRAIN_LOCAL_HOME"):
        cluster.up()


def test_a_relative_folder_for_the_state_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "state")
    assert clusters_root() == tmp_path / "state"


def test_the_help_of_up_says_where_the_state_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTTRAIN_LOCAL_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(local, ["up", "--help"])
    assert "SPOTTRAIN_LOCAL_HOME" in result.output
    assert f"Default: ~/{clusters_root().relative_to(tmp_path)}." in " ".join(result.output.split())
