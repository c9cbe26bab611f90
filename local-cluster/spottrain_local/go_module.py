"""The Go module that pins the control plane: local-cluster/controlplane."""

import re
from pathlib import Path

from spottrain_local.layout import LocalClusterError, checkout_root


def module_folder() -> Path:
    """Return the folder with go.mod."""
    return checkout_root() / "local-cluster" / "controlplane"


def pinned_version(module: str) -> str:
    """Return the version of a module in go.mod, with its `v`.

    Raises:
        LocalClusterError: It is not there.
    """
    text = (module_folder() / "go.mod").read_text()
    match = re.search(rf"^\s*{re.escape(module)} (v\S+)", text, re.MULTILINE)
    if not match:
        raise LocalClusterError(f"local-cluster/controlplane/go.mod does not require {module}: restore it.")
    return match.group(1)
