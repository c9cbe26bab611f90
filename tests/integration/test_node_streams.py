"""`kubectl exec`, `attach`, `cp` and `port-forward`.

The nodes run processes or containers.
"""

import fcntl
import hashlib
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml
from kubernetes.stream import portforward, stream

from cluster_fixtures import SMALL, Kubectl, throw_away_cluster, wait_for
from marked_processes import MARK, marked
from spottrain_local.install import find_kubectl

pytestmark = pytest.mark.cluster

NAMESPACE = "streams"
PORT = 8086
NOTHING: Mapping[str, str] = {}
# What kubectl speaks to the API server. The older protocol is that of other clients, too.
PROTOCOLS: Mapping[str, Mapping[str, str]] = {
    "websockets": {},
    "SPDY": {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false", "KUBECTL_PORT_FORWARD_WEBSOCKETS": "false"},
}
SERVER = f"""
import http.server, os
class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer((os.environ["LISTEN"], {PORT}), Echo)
print("ready", flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A cluster with a pod `target`.

    The pod has the containers `main`, `server` and `done`.
    """

    kubectl: Kubectl
    image: str

    def run(
        self, *args: str, data: bytes = b"", env: Mapping[str, str] = NOTHING
    ) -> subprocess.CompletedProcess[bytes]:
        command = [find_kubectl(), f"--kubeconfig={self.kubectl.kubeconfig}", "-n", NAMESPACE, *args]
        return subprocess.run(
            command, input=data, capture_output=True, check=False, timeout=60, env={**os.environ, **env}
        )

    def start(self, *args: str, env: Mapping[str, str] = NOTHING) -> subprocess.Popen[bytes]:
        command = [find_kubectl(), f"--kubeconfig={self.kubectl.kubeconfig}", "-n", NAMESPACE, *args]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env={**os.environ, **env})

    def create(self, name: str, *containers: dict[str, Any], **spec: Any) -> None:
        named = [
            {"name": f"c{i}", "image": self.image, "imagePullPolicy": "IfNotPresent"} | c
            for i, c in enumerate(containers)
        ]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": named, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1} | spec,
        }
        self.kubectl.create(pod, NAMESPACE)

    def wait_running(self, name: str) -> None:
        wait_for(lambda: self.status(name).get("phase") == "Running", f"pod {name} runs")

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.kubectl.get("pod", name, NAMESPACE)["status"]
        return status


@pytest.fixture(scope="module", params=["process", pytest.param("podman", marks=pytest.mark.containers)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if request.param == "process":
        cluster = request.getfixturevalue("local_cluster")
        yield from _with_pod(Target(kubectl=Kubectl(kubeconfig=cluster.kubeconfig), image="none"))
        return
    image = request.getfixturevalue("base_image")
    spec = SMALL.model_copy(update={"runtime": "podman"})
    with throw_away_cluster(tmp_path_factory.mktemp("podman") / "streams", spec) as cluster:
        yield from _with_pod(Target(kubectl=Kubectl(kubeconfig=cluster.kubeconfig), image=image))


def _with_pod(target: Target) -> Iterator[Target]:
    target.kubectl.create_namespace(NAMESPACE)
    try:
        # Processes have the machine's localhost, which is not the pod's.
        address = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        listen = {"name": "LISTEN"} | (address if target.image == "none" else {"value": "127.0.0.1"})
        mounts = [{"name": "data", "mountPath": "/data"}]
        target.create(
            "target",
            {
                "name": "main",
                "command": ["sh", "-c", "while sleep 0.1; do echo tick; done"],
                "env": [{"name": "GREETING", "value": "hello"}],
                "workingDir": "/data",
                "volumeMounts": mounts,
            },
            {"name": "server", "command": ["python3", "-c", SERVER], "env": [listen]},
            {"name": "done", "args": ["sh", "-c", "exit 3"]},
            volumes=[{"name": "data", "emptyDir": {}}],
        )
        target.wait_running("target")
        wait_for(lambda: "ready" in target.kubectl.log("target", NAMESPACE, container="server"), "it listens")
        yield target
    finally:
        target.kubectl.run("delete", "namespace", NAMESPACE, "--wait=false")
        target.kubectl.run("delete", "pod", "-n", NAMESPACE, "--all", "--grace-period=1")


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """Variables that make kubectl speak a protocol."""
    return PROTOCOLS[request.param]


def test_a_command_has_outputs_and_an_exit_code_of_its_own(target: Target, protocol: Mapping[str, str]) -> None:
    script = "echo $GREETING; pwd; echo wrong >&2; exit 7"
    done = target.run("exec", "target", "-c", "main", "--", "sh", "-c", script, env=protocol)
    greeting, folder = done.stdout.decode().splitlines()
    assert (greeting, done.returncode) == ("hello", 7)
    assert folder.endswith("/data")
    # Before them, a kubectl older than 1.34 may say that the API server greeted it before it was ready.
    assert done.stderr.decode().splitlines()[-2:] == ["wrong", "command terminated with exit code 7"]


def test_a_command_gets_all_of_its_input(target: Target, protocol: Mapping[str, str]) -> None:
    data = random.Random(1).randbytes(3_000_000)
    done = target.run("exec", "-i", "target", "--", "sh", "-c", "cat; echo end >&2", data=data, env=protocol)
    assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (0, "end")
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_a_signal_that_ends_a_command_is_its_exit_code(target: Target) -> None:
    assert target.run("exec", "target", "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_a_terminal_has_a_size_and_follows_changes(target: Target, protocol: Mapping[str, str]) -> None:
    terminal, its_side = pty.openpty()
    rows = 33
    _resize(terminal, rows, 99)
    # A command may start before it has the size.
    waiting = "until [ \"$(stty size)\" = '33 99' ]; do sleep 0.05; done; stty size"
    changing = "while [ $(stty size | cut -d' ' -f1) = 33 ]; do sleep 0.05; done; stty size"
    script = f'{waiting}; {changing}; read x; echo "<$x>"'
    command = [find_kubectl(), f"--kubeconfig={target.kubectl.kubeconfig}", "-n", NAMESPACE]
    command += ["exec", "-it", "target", "-c", "main", "--", "sh", "-c", script]
    # kubectl hears of a new size only from the terminal that controls it.
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        env={**os.environ, **protocol},
    ) as process:
        os.close(its_side)
        _read_until(terminal, b"33 99")
        seen = b""
        while b" 70\r\n" not in seen:  # kubectl forgets a size while it is busy.
            rows += 1
            _resize(terminal, rows, 70)
            seen += _read(terminal, seconds=1)
        os.write(terminal, b"word\n")
        _read_until(terminal, b"<word>")
        assert process.wait(30) == 0
    os.close(terminal)


def _resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _read(terminal: int, seconds: float) -> bytes:
    ready, _, _ = select.select([terminal], [], [], seconds)
    return os.read(terminal, 1000) if ready else b""


def _read_until(terminal: int, text: bytes) -> None:
    seen, end = b"", time.monotonic() + 20
    while text not in seen:
        assert time.monotonic() < end, f"{text!r} does not come; this has: {seen!r}"
        seen += _read(terminal, seconds=1)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("target", "--", "no-such-command"), 127, "no-such-command"),
        (("target", "-c", "nobody", "--", "ls"), 1, "nobody"),
        (("target", "-c", "done", "--", "ls"), 1, 'container "done" has ended: Error, exit code 3'),
        (("nobody", "--", "ls"), 1, 'pods "nobody" not found'),
    ],
    ids=["a command that does not exist", "an unknown container", "a container that has ended", "an unknown pod"],
)
def test_what_cannot_run_is_refused_with_a_sentence(
    target: Target, arguments: tuple[str, ...], code: int, sentence: str, protocol: Mapping[str, str]
) -> None:
    done = target.run("exec", *arguments, env=protocol)
    assert (done.returncode, done.stdout) == (code, b"")
    assert sentence in done.stderr.decode()


def test_attach_shows_the_output_from_now_on(target: Target, protocol: Mapping[str, str]) -> None:
    with target.start("attach", "target", "-c", "main", env=protocol) as process:
        assert process.stdout
        # Before them, kubectl says how to go on, and that it discards what came before it had its streams.
        lines = [process.stdout.readline() for _ in range(6)]
        process.kill()
    assert lines.count(b"tick\n") >= 4
    assert b"" not in lines


def test_a_container_ends_with_the_input_of_the_one_that_attaches(target: Target) -> None:
    arguments = ["run", "once", "-i", "--rm", "--restart=Never", f"--image={target.image}", "--command"]
    done = target.run(*arguments, "--", "sh", "-c", "sleep 1; cat; echo end", data=b"one\ntwo\n")
    assert done.stdout.decode().splitlines()[:3] == ["one", "two", "end"]
    assert done.returncode == 0


def test_one_attaches_to_a_terminal_again_and_again(target: Target) -> None:
    script = 'while read x; do echo "<$x>"; done'
    target.create("shell", {"command": ["sh", "-c", script], "stdin": True, "tty": True})
    target.wait_running("shell")
    for word in ("one", "two"):
        terminal, its_side = pty.openpty()
        command = [find_kubectl(), f"--kubeconfig={target.kubectl.kubeconfig}", "-n", NAMESPACE, "attach", "-it"]
        with subprocess.Popen([*command, "shell"], stdin=its_side, stdout=its_side, stderr=its_side) as process:
            os.close(its_side)
            os.write(terminal, f"{word}\n".encode())
            _read_until(terminal, f"<{word}>".encode())
            process.kill()
        os.close(terminal)
    assert target.status("shell")["phase"] == "Running"
    logs = target.run("logs", "shell").stdout.decode()
    assert re.findall("<(.*)>", logs) == ["one", "two"]


def test_files_are_copied_both_ways(target: Target, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(1_000_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(data)
    assert target.run("cp", str(tmp_path / "folder"), "target:/data/there", "-c", "main").returncode == 0
    found = target.run("exec", "target", "-c", "main", "--", "cat", "/data/there/file")
    assert found.stdout == data
    assert target.run("cp", "target:/data/there", str(tmp_path / "back"), "-c", "main").returncode == 0
    assert (tmp_path / "back" / "file").read_bytes() == data


def test_a_port_is_forwarded(target: Target, protocol: Mapping[str, str]) -> None:
    with target.start("port-forward", "pod/target", f":{PORT}", ":9", env=protocol) as process:
        try:
            ports = [_forwarded_port(process) for _ in range(2)]
            data = random.Random(3).randbytes(1_000_000)
            for _ in range(3):
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}", data, timeout=20) as answer:
                    assert answer.read() == data
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}", data, timeout=20)
            assert process.stdout
            while (line := process.stdout.readline().decode()) and "nothing in the pod answers on port 9" not in line:
                pass
            assert "connection refused" in line
        finally:
            process.kill()


def _forwarded_port(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout
    while not (found := re.match(r"Forwarding from 127\.0\.0\.1:(\d+) ->", process.stdout.readline().decode())):
        assert process.poll() is None, "kubectl port-forward has ended"
    return int(found[1])


def test_a_command_ends_with_its_client(target: Target, request: pytest.FixtureRequest) -> None:
    mark = f"{os.getpid()}-{request.node.name}"
    script = f"export {MARK}='{mark}'; trap '' HUP TERM; echo up; setsid sleep 1000 & sleep 1000"
    with target.start("exec", "target", "-c", "main", "--", "sh", "-c", script) as process:
        # An API server whose client goes before all streams are there may keep the command's connection.
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"up"
        wait_for(lambda: len(marked(mark)) >= 2, "the command runs")
        process.send_signal(signal.SIGKILL)
    # If the API server misses the end of the connection, its pings find out.
    wait_for(lambda: not marked(mark), "the command has ended", 90)


def test_a_command_ends_with_its_container(target: Target, request: pytest.FixtureRequest) -> None:
    mark = f"{os.getpid()}-{request.node.name}"
    target.create(
        "short",
        {
            "command": ["sh", "-c", "while [ ! -e /data/end ]; do sleep 0.05; done"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    target.wait_running("short")
    script = f"export {MARK}='{mark}'; setsid sleep 1000 & sleep 1000"
    with target.start("exec", "short", "--", "sh", "-c", script) as process:
        try:
            wait_for(lambda: len(marked(mark)) >= 2, "the command runs")
            target.run("exec", "short", "--", "touch", "/data/end")
            wait_for(lambda: not marked(mark), "the command has ended")
            process.wait(30)
        finally:
            process.kill()


def test_the_python_client_speaks_its_own_protocol(target: Target) -> None:
    config = yaml.safe_load(target.kubectl.kubeconfig.read_text())
    folder = str(target.kubectl.kubeconfig.parent)
    api = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config_dict(config, temp_file_path=folder))
    connect = api.connect_get_namespaced_pod_exec
    answer = stream(
        connect,
        "target",
        NAMESPACE,
        container="main",
        command=["sh", "-c", "read x; echo $x; exit 5"],
        stdin=True,
        stdout=True,
        stderr=True,
        tty=False,
        _preload_content=False,
    )
    answer.write_stdin("word\n")
    answer.run_forever(timeout=20)
    assert (answer.read_stdout(), answer.returncode) == ("word\n", 5)

    api = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config_dict(config, temp_file_path=folder))
    ports = portforward(api.connect_get_namespaced_pod_portforward, "target", NAMESPACE, ports=str(PORT))
    connection = ports.socket(PORT)
    connection.setblocking(True)
    connection.sendall(b"POST / HTTP/1.0\r\nContent-Length: 4\r\n\r\nword")
    received = b""
    while data := connection.recv(1000):
        received += data
    assert received.endswith(b"word")


HELD_MIB = 200
HOLDER = f"kept = b'x' * ({HELD_MIB} << 20)\nimport time\ntime.sleep(1000)"
# It prints how many thousandths of a processor it got in each second, and leaves the processor to everybody else.
SPINNER = """
import os, time
os.nice(19)
began, used = time.monotonic(), time.process_time()
while True:
    now = time.monotonic()
    if now - began >= 1:
        print(round(1000 * (time.process_time() - used) / (now - began)), flush=True)
        began, used = now, time.process_time()
"""


def test_top_shows_what_pods_and_nodes_use(target: Target) -> None:
    target.create(
        "busy",
        {"name": "holds", "command": ["python3", "-c", HOLDER]},
        {"name": "spins", "command": ["python3", "-c", SPINNER]},
    )

    def usage(*command: str) -> dict[str, tuple[int, int]]:
        lines = target.run("top", *command, "--no-headers").stdout.decode().splitlines()
        cells = [[cell for cell in line.split() if not cell.endswith("%")] for line in lines]
        known = (row for row in cells if "<unknown>" not in row)  # of other tests' nodes that come and go
        return {row[-3]: (int(row[-2].removesuffix("m")), int(row[-1].removesuffix("Mi"))) for row in known}

    def containers() -> dict[str, tuple[int, int]]:
        return usage("pods", "busy", "--containers")

    def spins_as_it_counts() -> bool:
        # How much it gets says more about what else the machine does.
        own = [int(line) for line in target.run("logs", "busy", "-c", "spins").stdout.split()]
        return min(own) - 100 <= containers()["spins"][0] <= max(own) + 100

    wait_for(lambda: set(containers()) == {"holds", "spins"}, "metrics-server knows the containers", 60)
    wait_for(spins_as_it_counts, "the processor time is what the container counts", 60)
    holds, spins = containers()["holds"], containers()["spins"]
    assert HELD_MIB <= holds[1] < 2 * HELD_MIB
    assert holds[0] < 100
    assert spins[1] < 100
    assert HELD_MIB <= usage("pods", "busy")["busy"][1] < 2 * HELD_MIB
    node = target.kubectl.get("pod", "busy", NAMESPACE)["spec"]["nodeName"]
    wait_for(lambda: usage("nodes").get(node, (0, 0))[1] > HELD_MIB, "metrics-server knows the node", 60)
    assert usage("nodes")[node][1] < 5 * HELD_MIB
    # Other tests' nodes come and go.
    assert set(usage("nodes")) >= SMALL.pool_of_nodes().keys()
    assert {"main", "server"} <= set(usage("pods", "target", "--containers"))
