"""A cluster that runs already, with the methods of pytest-kind's."""

import os
import shutil
import subprocess
from pathlib import Path


class KindCluster:
    """The cluster of KUBECONFIG, whatever name and image are given."""

    def __init__(self, name: str, image: str | None = None) -> None:
        self.name = name
        self.kubeconfig_path = Path(os.environ["KUBECONFIG"])
        self.kubectl_path = Path(str(shutil.which("kubectl")))

    def create(self) -> None:
        """It runs."""

    def delete(self) -> None:
        """It stays."""

    def kubectl(self, *args: str) -> str:
        """Return what kubectl prints."""
        command = [str(self.kubectl_path), f"--kubeconfig={self.kubeconfig_path}", *args]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
