"""Tokens that look like those that Kubernetes binds to pods."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from spottrain_api.contract import TOKEN_AUDIENCE
from spottrain_operator.cluster.client import PodIdentity


def pod_token(pod: PodIdentity, *, audience: object = TOKEN_AUDIENCE, seconds: object = 86400, name: str = "") -> str:
    """Return a token of the pod that expires in `seconds` seconds.

    Its signature is `name`, which no one verifies here.
    """
    expires = time.time() + seconds if isinstance(seconds, int) else seconds
    claims = {
        "aud": [audience],
        "exp": expires,
        "kubernetes.io": {"namespace": pod.namespace, "pod": {"name": pod.pod, "uid": pod.uid}},
    }
    return ".".join((_encoded({"alg": "RS256"}), _encoded(claims), _encoded(name)))


def _encoded(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
