"""What only containers have: images, users, mounts, networks and limits.

And that nothing of them is left.
"""

import asyncio
import http.client
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_fixtures import throw_away_cluster, wait_for
from container_fixtures import command
from container_worlds import NODE, World, podman_world
from marked_processes import marked
from spottrain_local.address import claim_network
from spottrain_local.gateway import NameServer, serve_gateway
from spottrain_local.node.containers import ContainerConfigError, ContainerRun, ImageError, Mount
from spottrain_local.node.limits import ContainerLimits
from spottrain_local.node.pod_network import PodNetwork
from spottrain_local.node.podman_runtime import NodeIdentity, PodmanRuntime
from spottrain_local.podman import (
    NETWORK_LABEL,
    bridge_name,
    create_bridge,
    gateway_ip,
    is_network_free,
    namespaces,
    remove_cluster,
    remove_dead_clusters,
    run,
)
from spottrain_local.spec import ClusterSpec

pytestmark = pytest.mark.containers

OWN_IMAGE = "localhost/spottrain-test-entrypoint:1"


@pytest.fixture(scope="module")
def own_image(base_image: str) -> str:
    """An image with an entrypoint, arguments, a user and a folder."""
    lines = [
        f"FROM {base_image}",
        "ENV FROM_IMAGE=yes",
        "USER 1234",
        "WORKDIR /srv",
        'ENTRYPOINT ["echo", "entry"]',
        'CMD ["args"]',
    ]
    command("podman", "build", "--tag", OWN_IMAGE, "-f", "-", input="\n".join(lines))
    return OWN_IMAGE


@pytest.fixture
async def world(base_image: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with podman_world(tmp_path, f"{os.getpid()}-{request.node.name}", base_image) as world:
        yield world


async def output(world: World, run: ContainerRun) -> list[str]:
    """What a container prints until it ends well."""
    await world.runtime.prepare(run)
    ended = await (await world.runtime.start(run)).wait()
    assert ended.exit_code == 0, world.output(run.name)
    return world.output(run.name)


@pytest.mark.parametrize(
    ("own_command", "args", "expected"),
    [
        ((), (), "entry args"),
        ((), ("mine",), "entry mine"),
        (("echo", "command"), (), "command"),
        (("echo", "command"), ("mine",), "command mine"),
    ],
    ids=["neither", "args alone", "command alone", "both"],
)
async def test_the_images_entrypoint_and_arguments_are_overridden(
    world: World, own_image: str, own_command: tuple[str, ...], args: tuple[str, ...], expected: str
) -> None:
    assert await output(world, world.run(*own_command, image=own_image, args=args)) == [expected]


async def test_the_images_user_folder_and_variables_hold(world: World, own_image: str) -> None:
    script = "id -u; pwd; echo $FROM_IMAGE"
    assert await output(world, world.run("sh", "-c", script, image=own_image)) == ["1234", "/srv", "yes"]


async def test_a_user_without_rights(world: World) -> None:
    limits = ContainerLimits(
        user=65532, group=65533, groups=(65534,), dropped_capabilities=("ALL",), escalation=False, non_root=True
    )
    script = "id -u; id -g; id -G; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status"
    found = await output(world, world.run("sh", "-c", script, limits=limits, working_dir="/tmp"))
    assert found == ["65532", "65533", "65533 65534", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"]


async def test_a_read_only_root(world: World) -> None:
    script = "for f in /x /tmp/x /run/x; do touch $f 2>/dev/null && echo $f; done; echo end"
    assert await output(world, world.run("sh", "-c", script, limits=ContainerLimits(read_only_root=True))) == ["end"]


async def test_mounts(world: World, tmp_path: Path) -> None:
    for name in ("writable", "readable"):
        (tmp_path / name).mkdir()
    mounts = (
        Mount(source=tmp_path / "writable", target="/data/w"),
        Mount(source=tmp_path / "readable", target="/data/r", read_only=True),
    )
    script = "echo text > /data/w/f; touch /data/r/f 2>/dev/null || echo refused"
    assert await output(world, world.run("sh", "-c", script, mounts=mounts)) == ["refused"]
    assert (tmp_path / "writable" / "f").read_text() == "text\n"


async def test_too_much_memory(world: World) -> None:
    run = world.run("python", "-c", "b'x' * 2**28", limits=ContainerLimits(memory_bytes=2**26))
    # Whether podman knows the reason depends on the version of the machine's cgroups.
    assert (await (await world.runtime.start(run)).wait()).exit_code == 137


async def test_a_pod_has_an_address_which_its_containers_share(world: World) -> None:
    server = await world.runtime.start(world.run("python", "-u", "-m", "http.server", "8000", name="server"))
    probe = "import http.client as h, time\nfor _ in range(200):\n"
    probe += "  try: c = h.HTTPConnection('127.0.0.1', 8000); c.request('GET', '/'); break\n"
    probe += "  except OSError: time.sleep(0.05)\nprint(c.getresponse().status)"
    assert await output(world, world.run("python", "-c", probe)) == ["200"]
    connection = http.client.HTTPConnection(world.pod.ip, 8000, timeout=5)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    server.kill()
    await server.wait()


async def test_a_pod_knows_its_name_and_reaches_nothing_else(world: World) -> None:
    script = "import socket\nprint(socket.gethostbyname('pod-1'))\n"
    script += "try: socket.create_connection(('192.0.2.1', 53), 2)\nexcept OSError as e: print(e.errno)"
    assert await output(world, world.run("python", "-c", script)) == [world.pod.ip, "101"]


@contextmanager
def neighbour(network: int) -> Iterator[Callable[[str, int], str]]:
    """Another network of this machine, with a route into the cluster's.

    Yields a function that connects from there.
    """
    claim = claim_network(usable=is_network_free)
    try:
        create_bridge(claim.number)
        there = PodNetwork(bridge=bridge_name(claim.number), node=NODE)
        there.add(f"10.{claim.number}.1.1")
        name, router = there.namespace().name, gateway_ip(claim.number)
        run("ip", "-netns", name, "route", "add", f"10.{network}.0.0/16", "via", router)

        def connect(ip: str, port: int) -> str:
            script = f"import socket; socket.create_connection(('{ip}', {port}), 3)"
            return run("ip", "netns", "exec", name, sys.executable, "-c", script)

        with socket.create_server((gateway_ip(network), 0)) as open_to_all:
            connect(*open_to_all.getsockname())
        yield connect
    finally:
        remove_cluster(claim.number)
        claim.release()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"welcome, " + await reader.read())
    writer.close()


async def test_the_gateway_serves_pods_and_nobody_else(world: World) -> None:
    names = NameServer()
    names.update(f"{world.pod.ip} control.team.svc.cluster.local\n")
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as here:
        port = here.sockets[0].getsockname()[1]
        async with serve_gateway(world.network, names, [port]):
            script = "import socket\nprint(socket.gethostbyname('control.team.svc'))\n"
            script += f"s = socket.create_connection(('{gateway_ip(world.network)}', {port}))\n"
            script += "s.sendall(b'pod'); s.shutdown(socket.SHUT_WR); print(s.recv(100).decode())"
            assert await output(world, world.run("python", "-c", script)) == [world.pod.ip, "welcome, pod"]
            with neighbour(world.network) as connect, pytest.raises(OSError, match=r"refused|timed out"):
                connect(gateway_ip(world.network), port)


async def test_a_nodes_own_address_is_for_its_pods_on_the_host_network(world: World, tmp_path: Path) -> None:
    where = ("169.254.169.254", 47123)
    on_host = replace(world.pod, uid="host", host_network=True, directory=tmp_path / "host")
    await world.runtime.add_pod(on_host)
    script = f"import socket; socket.create_connection({where}, 5); print('connected')"
    with world.runtime.listen(*where):
        assert await output(world, world.run("python", "-c", script, pod=on_host)) == ["connected"]
        with pytest.raises(OSError, match=r"unreachable|timed out|refused"):
            socket.create_connection(where, 1)


@pytest.mark.parametrize(
    ("image", "policy", "reason"),
    [
        ("localhost/nothing:1", "Never", "ErrImageNeverPull"),
        ("localhost/nothing:1", "IfNotPresent", "ErrImagePull"),
        ("localhost/Nothing::1", "IfNotPresent", "InvalidImageName"),
    ],
)
async def test_an_image_that_is_missing(world: World, image: str, policy: str, reason: str) -> None:
    with pytest.raises(ImageError) as error:
        await world.runtime.prepare(world.run(image=image, pull_policy=policy))
    assert error.value.reason == reason


async def test_an_image_of_root_is_refused_to_a_pod_that_must_not_be(world: World) -> None:
    with pytest.raises(ContainerConfigError, match="image will run as root"):
        await world.runtime.prepare(world.run(limits=ContainerLimits(non_root=True)))


NODE_PROCESS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from container_worlds import World, _pod
from spottrain_local.node.podman_runtime import NodeIdentity, PodmanRuntime

async def main(network, directory, mark, image):
    node = NodeIdentity(name="n-0", ip=f"10.{network}.1.1", network=network, gateway=f"10.{network}.0.1")
    world = World(runtime=PodmanRuntime(node), image=image, pod=_pod(directory, f"10.{network}"), mark=mark,
                  network=network)
    await world.runtime.open()
    await world.runtime.add_pod(world.pod)
    for name in ("a", "b"):
        await world.runtime.start(world.run("sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000", name=name))
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]))
"""


def start_and_kill_node(world: World, folder: Path, mark: str) -> None:
    """A node process of its own starts two containers, and is killed.

    They end with it.
    """
    folder.mkdir()
    arguments = [str(Path(__file__).parents[1]), str(world.network), str(folder), mark, world.image]
    with subprocess.Popen([sys.executable, "-c", NODE_PROCESS, *arguments], stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == b"ready\n"
            wait_for(lambda: len(marked(mark)) >= 6, "both containers have their processes", 5)
        finally:
            node.kill()
    wait_for(lambda: not marked(mark), "the containers' processes are gone", 5)


async def test_a_killed_node_takes_its_containers_and_the_next_one_removes_the_rest(
    world: World, tmp_path: Path
) -> None:
    await asyncio.to_thread(start_and_kill_node, world, tmp_path / "killed", f"{os.getpid()}-killed-node")
    assert len(leftovers(world.network)) == 2
    node = NodeIdentity(
        name=NODE, ip=f"10.{world.network}.1.1", network=world.network, gateway=gateway_ip(world.network)
    )
    await PodmanRuntime(node).open()
    assert leftovers(world.network) == []
    assert namespaces(world.network) == [f"{bridge_name(world.network)}.{NODE}"]


def test_a_bridge_is_removed_with_all_that_hangs_on_it(world: World) -> None:
    create_bridge(world.network)
    assert namespaces(world.network) == []
    remove_cluster(world.network)
    assert not Path("/sys/class/net", bridge_name(world.network)).exists()


async def test_what_dead_clusters_have_left_is_removed_and_what_a_living_one_has_is_not(
    world: World, tmp_path: Path
) -> None:
    """Nobody claims the network after the end of a supervisor or of the machine."""
    container = await world.start("sh", "-c", "echo ready; sleep 1000")
    await world.wait_for_output("ready")
    claim = claim_network(usable=is_network_free)
    create_bridge(claim.number)
    dead = PodNetwork(bridge=bridge_name(claim.number), node=NODE)
    dead.add(f"10.{claim.number}.1.1")
    command("podman", "create", f"--label={NETWORK_LABEL}={claim.number}", "--network=none", world.image, "true")
    claim.release()

    remove_dead_clusters()

    assert leftovers(claim.number) == []
    assert namespaces(claim.number) == []
    assert not Path("/sys/class/net", bridge_name(claim.number)).exists()
    assert len(leftovers(world.network)) == 1
    assert len(namespaces(world.network)) == 2
    container.kill()
    await container.wait()


def test_up_and_down_remove_what_other_clusters_have_left(podman_settings: None, tmp_path: Path) -> None:
    claim = claim_network(200, usable=is_network_free)
    claim.release()
    bridge = Path("/sys/class/net", bridge_name(claim.number))
    create_bridge(claim.number)
    with throw_away_cluster(tmp_path / "c", ClusterSpec(runtime="podman")) as cluster:
        assert not bridge.exists()
        create_bridge(claim.number)
        cluster.down()
        assert not bridge.exists()


def leftovers(network: int) -> list[str]:
    return command("podman", "ps", "--all", "--quiet", f"--filter=label={NETWORK_LABEL}={network}").split()
