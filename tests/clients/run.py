"""Runs the end-to-end tests of public Kubernetes clients, unmodified.

`make test-clients` runs them against a local cluster. Nothing of theirs is part of this project. Their sources are
fetched into build/clients, and what they need is installed into an environment of their own.
docs/reference/local-kubernetes.md says what to expect.
"""

import argparse
import os
import subprocess
import sys
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spottrain_local.cluster import Cluster
from spottrain_local.install import find_kubectl
from spottrain_local.layout import ClusterLayout, checkout_root
from spottrain_local.spec import DEFAULT_SPEC, Runtime

# A pod whose image has no command here never starts; its tests wait for ever.
TEST_SECONDS = 30
PYTEST = ("pytest", "pytest-asyncio", "pytest-timeout", "trio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The tests of one client.

    They are in its source distribution, or else in its `repository`. `folder` is where they are run; `tests` is
    relative to it.
    """

    version: str
    repository: str = ""
    requirements: tuple[str, ...] = ()
    folder: str = "."
    tests: str = "."
    options: tuple[str, ...] = ()


SUITES: Mapping[str, Suite] = {
    "kubernetes": Suite(
        repository="https://github.com/kubernetes-client/python",
        version="36.0.2",
        tests="kubernetes/e2e_test",
    ),
    "kr8s": Suite(
        version="0.20.15",
        # Its release is older than the newest of these, and does not work with them.
        requirements=("httpx-ws<0.9", "kubernetes<37", "kubernetes-asyncio", "lightkube", "pykube-ng"),
        tests="kr8s/tests",
        # Its own options name plugins. Its cluster comes from pytest-kind, for which we have a stand-in.
        options=("-p", "pytest_kind.plugin", "-o", "addopts=", "--keep-cluster"),
    ),
    "lightkube": Suite(
        repository="https://github.com/gtsystem/lightkube",
        version="1.0.1",
        folder="e2e-tests",
        options=("-o", "asyncio_mode=auto"),
    ),
}


def main() -> int:
    """Run the suites that are named, or all, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--runtime", choices=["process", "podman"], default="process")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no suite is called {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    root = checkout_root() / "build" / "clients"
    names = options.suites or list(SUITES)
    python = _environment(root / "venv", names)
    sources = {name: _source(name, SUITES[name], root, python) for name in names}
    with _cluster(root / "clients", options.runtime) as kubeconfig:
        for name, source in sources.items():
            _report(name, _run(name, source, python, root, kubeconfig))
    return 0


def _environment(folder: Path, names: list[str]) -> Path:
    """Return the Python of an environment with the clients and their tests' needs."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    clients = [f"{name}=={SUITES[name].version}" for name in names]
    helpers = {text for name in names for text in SUITES[name].requirements if text not in names}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PYTEST, *clients, *sorted(helpers)], check=True)
    return python


def _source(name: str, suite: Suite, root: Path, python: Path) -> Path:
    """Fetch a client's source, unless it is there, and return its folder."""
    source = root / f"{name}-{suite.version}"
    if source.exists():
        return source
    if suite.repository:
        command = [
            "git",
            "clone",
            "--quiet",
            "--depth=1",
            f"--branch=v{suite.version}",
            suite.repository,
            str(source),
        ]
    else:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", f"--no-binary={name}"]
        command += [f"--dest={root}", f"{name}=={suite.version}"]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"The source of {name} {suite.version} cannot be fetched. Put it into {source}, and try again.")
    if not suite.repository:
        archive = root / f"{source.name}.tar.gz"
        subprocess.run(["tar", "--extract", f"--file={archive}", f"--directory={root}"], check=True)
    return source


@contextmanager
def _cluster(folder: Path, runtime: Runtime) -> Iterator[Path]:
    """Run a cluster of its own, and yield its kubeconfig."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(layout=ClusterLayout(root=folder))
    cluster.down(delete=True)
    cluster.up(DEFAULT_SPEC.model_copy(update={"runtime": runtime}))
    try:
        _add_system_pod(cluster.kubeconfig)
        yield cluster.kubeconfig
    finally:
        cluster.down()


def _add_system_pod(kubeconfig: Path) -> None:
    """Add a pod to kube-system.

    The clients' own clusters, kind and k3s, run parts of the control plane in pods, and tests list these.
    """
    command = [find_kubectl(), f"--kubeconfig={kubeconfig}", "create", "deployment", "metrics-server"]
    command += ["--namespace=kube-system", "--image=none", "--", "sleep", "infinity"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _run(name: str, source: Path, python: Path, root: Path, kubeconfig: Path) -> Path:
    """Run one suite, and return its report in JUnit's format."""
    suite, report = SUITES[name], root / f"{name}.xml"
    path = f"{python.parent}:{Path(find_kubectl()).parent}:{os.environ['PATH']}"
    stand_ins = str(Path(__file__).parent / "kind")
    command = [str(python), "-m", "pytest", "-q", f"--timeout={TEST_SECONDS}", f"--junitxml={report}", *suite.options]
    with (root / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, suite.tests],
            cwd=source / suite.folder,
            env=os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": path, "PYTHONPATH": stand_ins},
            stdout=log,
            stderr=log,
            check=False,
        )
    return report


def _report(name: str, report: Path) -> None:
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    print(f"{name}: {passed} passed, {len(failed)} failed, {len(skipped)} skipped; see {report.with_suffix('.log')}")
    for case in failed:
        print(f"  {case.get('classname')}.{case.get('name')}")


if __name__ == "__main__":
    sys.exit(main())
