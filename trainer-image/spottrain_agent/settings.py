"""What the agent reads from its environment, once, when it starts."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from spottrain_api.contract import names
from spottrain_api.contract.assignments import CapacityType

# Folder of the run directories, `g<n>` for generation n.
ENV_RUN_ROOT = "SPOTTRAIN_RUN_ROOT"
DEFAULT_GRACE_SECONDS = 30.0


class InvalidEnvironment(Exception):
    """The pod's environment lacks something that the agent needs. The message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What the pod's environment says.

    Attributes:
        control_dir: Folder with the address of the control API.
        watcher_url: None on nodes that no cloud takes back.
        grace_seconds: The pod's termination grace period: the time between SIGTERM and SIGKILL.
    """

    control_dir: Path
    token_file: Path | None
    pod: str
    pod_uid: str
    pod_ip: str
    node: str
    watcher_url: str | None
    grace_seconds: float
    run_root: Path

    @classmethod
    def from_environment(cls) -> Self:
        """Read the environment. Raises InvalidEnvironment, which names what is missing."""
        pod = _required(names.ENV_POD_NAME)
        token_file = os.environ.get(names.ENV_TOKEN_FILE)
        default_root = Path(tempfile.gettempdir()) / "spottrain" / pod
        return cls(
            control_dir=Path(_required(names.ENV_CONTROL_DIR)),
            token_file=Path(token_file) if token_file else None,
            pod=pod,
            pod_uid=_required(names.ENV_POD_UID),
            pod_ip=_required(names.ENV_POD_IP),
            node=os.environ.get(names.ENV_NODE_NAME, ""),
            watcher_url=_watcher_url(),
            grace_seconds=_seconds(names.ENV_GRACE_SECONDS, DEFAULT_GRACE_SECONDS),
            run_root=Path(os.environ.get(ENV_RUN_ROOT) or default_root),
        )


def _required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise InvalidEnvironment(
            f"The environment variable {name} is not set. The operator sets it in every trainer pod; "
            "to run a script without the operator, use torchrun."
        )
    return value


def _seconds(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name) or default)
    except ValueError:
        raise InvalidEnvironment(f"{name} is {os.environ[name]!r}, but must be a number of seconds.") from None


def _watcher_url() -> str | None:
    host = os.environ.get(names.ENV_HOST_IP)
    if os.environ.get(names.ENV_CAPACITY_TYPE) != CapacityType.SPOT or not host:
        return None
    port = os.environ.get(names.ENV_WATCHER_PORT) or str(names.WATCHER_PORT)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
