"""The smallest spec that is valid."""

from __future__ import annotations

from typing import Any

MINIMAL: dict[str, Any] = {
    "image": "trainer",
    "entrypoint": {"script": "train.py"},
    "nodes": {"max": 4},
    "batch": {"global": 8},
    "checkpoint": {"uri": "s3://bucket/run"},
}
