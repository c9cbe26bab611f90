"""podman for tests: a separate store of images, and settings for any machine.

A machine without a registry gets a stand-in for `python:3.11-slim`: Debian and its Python, by debootstrap.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from spottrain_local.cluster import Cluster
from spottrain_local.install import operator_image as find_operator_image
from spottrain_local.layout import cache_root, checkout_root
from spottrain_local.podman import NETWORK_LABEL, NODE_LABEL

BASE_IMAGE = "docker.io/library/python:3.11-slim"
# Where every container has the packages of this environment, among them torch.
SITE_PACKAGES = "/opt/site-packages"
# The ulimits do without the right to raise limits, the manager without systemd.
CONTAINERS_CONF = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
{runtime}
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
volumes = {volumes}
"""
STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{store}/images"
runroot = "{store}/run"
"""


def command(*arguments: str, **more: object) -> str:
    """What a command prints; fails the test with its complaint."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(arguments[:4])}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return str(done.stdout)


def network(cluster: Cluster) -> int:
    """The number of the cluster's network."""
    number: int = yaml.safe_load(cluster.layout.address.read_text())["network"]
    return number


def containers(cluster: Cluster, node: str = "", *, show: str = "{{.ID}}") -> list[str]:
    """List the containers of the cluster or of a node, in any state.

    `show` formats each container that podman knows of.
    """
    filters = [f"--filter=label={NETWORK_LABEL}={network(cluster)}"]
    filters += [f"--filter=label={NODE_LABEL}={node}"] if node else []
    return command("podman", "ps", "--all", f"--format={show}", *filters).splitlines()


def image_exists(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


@pytest.fixture(scope="session")
def podman_settings() -> Iterator[Path]:
    """Settings of podman for this process and its children.

    Yields a folder that all containers have under the same path. The fixture fails if podman is missing.
    """
    if not shutil.which("podman") or os.geteuid() != 0:
        pytest.fail("The tests of containers need root, podman and iproute2: see docs/how-to/containers.md.")
    store = cache_root() / "containers"
    store.mkdir(parents=True, exist_ok=True)
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shared = Path(folder) / "shared"
        shared.mkdir()
        volumes = json.dumps([f"{Path(torch.origin).parents[1]}:{SITE_PACKAGES}:ro", f"{shared}:{shared}"])
        settings = {
            "CONTAINERS_CONF": CONTAINERS_CONF.format(runtime=runtime, volumes=volumes),
            "CONTAINERS_STORAGE_CONF": STORAGE_CONF.format(store=store),
        }
        for name, text in settings.items():
            path = Path(folder) / f"{name}.toml"
            path.write_text(text)
            patch.setenv(name, str(path))
        yield shared


@pytest.fixture
def shared_folder(podman_settings: Path) -> Iterator[Path]:
    """A folder that containers have under the same path. Any user may write to it."""
    with tempfile.TemporaryDirectory(dir=podman_settings) as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture(scope="session")
def base_image(podman_settings: Path) -> str:
    """The base of our images: from the registry, or a stand-in of the same name."""
    if not image_exists(BASE_IMAGE):
        pulled = subprocess.run(
            ["podman", "pull", "--quiet", BASE_IMAGE], capture_output=True, text=True, check=False
        )
        if pulled.returncode:
            _import_stand_in()
    return BASE_IMAGE


def _import_stand_in() -> None:
    packages = "python3,python3-dev,python3-venv,ca-certificates"
    with tempfile.TemporaryDirectory(dir=cache_root()) as folder:
        root = Path(folder) / "root"
        command("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
        (root / "usr/bin/python").symlink_to("python3")
        for leftover in (root / "var/cache/apt/archives").glob("*.deb"):
            leftover.unlink()
        # pip in the image reaches the registry as this machine's does.
        for file in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
            if Path(file).exists():
                shutil.copy(file, root / file.lstrip("/"))
        command("tar", "-C", str(root), "-cf", f"{folder}/root.tar", ".")
        command("podman", "import", f"{folder}/root.tar", BASE_IMAGE)


@pytest.fixture(scope="session")
def operator_image(base_image: str) -> str:
    """The image of operator and watcher, built from our Dockerfile.

    It has the name that `local up` looks for.
    """
    image = find_operator_image()
    # The build runs in this machine's network: a user's podman has one of its own for that.
    command("podman", "build", "--isolation=chroot", "--network=host", f"--tag={image}", str(checkout_root()))
    return image


JOBS = "tests/e2e/jobs"
TRAINER = f"""
FROM {BASE_IMAGE}
COPY . /opt/spottrain
ENV PYTHONPATH=/opt/spottrain:{SITE_PACKAGES} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=spottrain
USER 65532:65532
WORKDIR /opt/spottrain
ENTRYPOINT ["python", "-m", "spottrain_agent"]
"""


@pytest.fixture(scope="session")
def trainer_image(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trainer, agent and the scripts of tests/e2e/jobs in an image.

    torch and everything else are mounted from this machine. So the fixture doesn't build trainer-image/Dockerfile,
    whose torch has 5 GB.
    """
    root, context = checkout_root(), tmp_path_factory.mktemp("trainer-image")
    packages = (
        *("runtime/spottrain_runtime", "api/spottrain_api", "planner/spottrain_planner"),
        *("trainer-image/spottrain", "trainer-image/spottrain_agent"),
    )
    for package in packages:
        shutil.copytree(root / package, context / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / JOBS, context / JOBS, ignore=shutil.ignore_patterns("__pycache__"))
    (context / "Dockerfile").write_text(TRAINER)
    image = "localhost/spottrain-trainer-test:1"
    command("podman", "build", "--isolation=chroot", f"--tag={image}", str(context))
    return image
