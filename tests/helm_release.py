"""The chart, installed into a local cluster by the real Helm, as a user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster_fixtures import Kubectl
from rendered_objects import objects_in
from spottrain_api import crd
from spottrain_local.cluster import Cluster
from spottrain_local.install import NAMESPACE, RELEASE, chart_folder, find_helm, local_values

# A field of spec.runPolicy that the older chart lacks.
NEWER_FIELD = "activeDeadlineSeconds"


def older_chart(folder: Path) -> Path:
    """This chart with a CRD that lacks NEWER_FIELD."""
    chart = shutil.copytree(chart_folder(), folder / "older-chart")
    file = chart / "definitions" / f"{crd.NAME}.yaml"
    [definition] = objects_in(file.read_text())
    del _run_policy(definition)[NEWER_FIELD]
    file.write_text(yaml.safe_dump(definition))
    return chart


def _run_policy(definition: dict[str, Any]) -> dict[str, Any]:
    [version] = definition["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["runPolicy"]["properties"]
    assert isinstance(fields, dict)
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class HelmRelease:
    """A release in a cluster.

    `folder` has the cluster's values, and the files that Helm keeps.
    """

    cluster: Cluster
    folder: Path
    name: str = RELEASE
    namespace: str = NAMESPACE

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(kubeconfig=self.cluster.kubeconfig)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run Helm in the release's namespace, whatever comes of it."""
        env = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}
        env |= {f"HELM_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        command = [find_helm(), *args, "--namespace", self.namespace]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    def __call__(self, *args: str) -> str:
        """What Helm prints; fails the test with what it complains about."""
        done = self.run(*args)
        assert done.returncode == 0, f"helm {' '.join(args)}: {done.stderr}{done.stdout}"
        return done.stdout

    def has_newer_crd(self) -> bool:
        """Whether the cluster's CRD knows NEWER_FIELD."""
        return NEWER_FIELD in _run_policy(json.loads(self.kubectl("get", "crd", crd.NAME, "-o", "json")))

    def upgrade(self, *args: str, chart: Path | None = None, is_validated: bool = False) -> list[str]:
        """The arguments of a command that installs or upgrades the release.

        It uses this checkout's chart, if no other is given, and the values of a local cluster. If it is validated,
        Helm compares all objects with the API server's schema, which takes a second of a processor.
        """
        values = self.folder / "values.yaml"
        if not values.exists():
            values.write_text(yaml.safe_dump(local_values(self.cluster.spec(), self.cluster.unused_ip())))
        files = ("--values", str(chart_folder() / "values.local.yaml"), "--values", str(values))
        options = ("--create-namespace", *(() if is_validated else ("--disable-openapi-validation",)))
        return ["upgrade", "--install", self.name, str(chart or chart_folder()), *options, *files, *args]


@contextmanager
def installed(release: HelmRelease) -> Iterator[None]:
    """Whatever the block installs, nothing of the release is left, and none of its CRDs."""
    try:
        yield
    finally:
        release.run("uninstall", release.name, "--ignore-not-found", "--wait")
        release.kubectl.delete_definitions(crd.definitions())
        release.kubectl("delete", "namespace", "--ignore-not-found", release.namespace)
