"""Networks, keys, binaries and child processes of the local cluster."""

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from spottrain_local.address import claim_network, free_port
from spottrain_local.binaries import PACKAGES, ensure_binaries, find_binaries
from spottrain_local.cli import local
from spottrain_local.layout import LocalClusterError
from spottrain_local.pki import open_authority
from spottrain_local.processes import ChildProcess, ProcessSpec

FAKE_GO = """#!/bin/sh
# Stands in for the Go tool: answers as it does, and "compiles" by touching files.
case "$1" in
  env) echo go1.26.0 ;;
  list) printf 'a/b\\nc/d\\n' ;;
  build)
    {before}
    for word; do [ "$previous" = -o ] && target="$word"; previous="$word"; done
    for name in server helm kube-apiserver kube-controller-manager kube-scheduler; do
      echo $name > "$target$name"
    done
    printf 'a/b\\nc/d\\n' >&2 ;;
esac
"""


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


def test_keys_are_for_the_user_alone_and_an_authority_is_kept(tmp_path: Path) -> None:
    pair = open_authority(tmp_path, "ca").issue(tmp_path / "admin", "admin", organizations=["system:masters"])
    assert stat.S_IMODE(pair.key.stat().st_mode) == 0o600
    before = (tmp_path / "ca.crt").read_bytes()
    open_authority(tmp_path, "ca")
    assert (tmp_path / "ca.crt").read_bytes() == before


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Go tool on the PATH that builds nothing, and a cache of its own."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO.format(before=""))
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return go


def test_binaries_are_built_once(fake_go: Path) -> None:
    assert find_binaries() is None
    binaries = ensure_binaries(Console(quiet=True))
    assert all(binaries.path(name).is_file() for name in PACKAGES)
    fake_go.write_text("#!/bin/sh\nexit 1\n")
    assert ensure_binaries(Console(quiet=True)) == binaries


def test_a_failed_build_leaves_nothing_and_says_why(fake_go: Path, tmp_path: Path) -> None:
    fake_go.write_text(FAKE_GO.format(before="echo no space left on device; exit 1"))
    with pytest.raises(LocalClusterError, match="no space left on device"):
        ensure_binaries(Console(quiet=True))
    assert find_binaries() is None
    assert list((tmp_path / "cache" / "spottrain").glob("controlplane-*")) == []


def test_foreign_binaries_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(LocalClusterError, match=r"There is no etcd in .*KUBEBUILDER_ASSETS"):
        find_binaries()


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


async def _pid_other_than(child: ChildProcess, other: int | None) -> int:
    async with asyncio.timeout(10):
        while True:
            if child.pid not in (None, other):
                break
            await asyncio.sleep(0.01)
    assert child.pid
    return child.pid


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from spottrain_local.processes import ProcessSpec, start_process

        async def main():
            spec = ProcessSpec(name="sleeper", argv=["sleep", "600"], log_file=Path(sys.argv[1]))
            print((await start_process(spec)).pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program, tmp_path / "log"], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout
        child = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()
    pidfd_gone(child)


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
        (["preempt", "spot-0"], "is not running: start it with `spottrain local up`"),
        (["kill", "spot-0", "--name", "Nope!"], "can't name a cluster"),
        (["store", "--name", "absent"], "start it with `spottrain local up --name absent`"),
        (["up", "--nodes", "/nowhere.yaml"], "/nowhere.yaml can't be read"),
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


def test_down_of_what_does_not_run_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path))
    result = CliRunner().invoke(local, ["down"])
    assert result.exit_code == 0
    assert "is not running" in result.output
