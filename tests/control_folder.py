"""The files by which an agent finds the control API, as the kubelet writes them."""

from __future__ import annotations

from pathlib import Path

from spottrain_api.contract.names import FILE_CONTROL_CA, FILE_CONTROL_URL


def control_folder(folder: Path, url: object, authorities: str = "") -> Path:
    """Write them into `folder`, and return it."""
    folder.mkdir(exist_ok=True)
    (folder / FILE_CONTROL_URL).write_text(str(url))
    (folder / FILE_CONTROL_CA).write_text(authorities)
    return folder
