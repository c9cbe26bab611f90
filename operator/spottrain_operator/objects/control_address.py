"""Where agents reach the control API.

Pods carry it as annotations, which also reach pods that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from spottrain_api.contract.names import (
    ANNOTATION_CONTROL_CA,
    ANNOTATION_CONTROL_URL,
    FILE_CONTROL_CA,
    FILE_CONTROL_URL,
)
from spottrain_operator.kube.resources import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """The address, and how agents know that it is the operator's.

    Attributes:
        url: https://host:port.
        ca: Certificates of authorities, in PEM. Empty: those that the pod's image trusts.
    """

    url: str
    ca: str = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def annotations(self) -> dict[str, str]:
        return {ANNOTATION_CONTROL_URL: self.url, ANNOTATION_CONTROL_CA: self.ca}


# Files of the annotations, for the volume that has the token.
CONTROL_FILES: Manifest = {
    "downwardAPI": {
        "items": [
            {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
            for path, annotation in (
                (FILE_CONTROL_URL, ANNOTATION_CONTROL_URL),
                (FILE_CONTROL_CA, ANNOTATION_CONTROL_CA),
            )
        ]
    }
}


def with_old_address(pods: Iterable[Manifest], address: ControlAddress) -> Iterator[Manifest]:
    """The pods that run and have a different address, or none."""
    for pod in pods:
        annotations = pod["metadata"].get("annotations") or {}
        lives = pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        if lives and not address.annotations.items() <= annotations.items():
            yield pod
