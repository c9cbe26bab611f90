"""Tokens that look like those that Kubernetes binds to pods."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_operator.control_api.cluster_keys import ISSUER_PATH, KEYS_PATH
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import Manifest


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


def answers(issuer: str, key_set: Any) -> dict[str, Manifest]:
    """What an API server answers by path about its issuer and its keys."""
    return {ISSUER_PATH: {"issuer": issuer}, KEYS_PATH: key_set}


class SigningIssuer:
    """Signs tokens as an API server does, with one key at a time."""

    name = "https://kubernetes.default.svc"

    def __init__(self, key_name: str = "key-1", algorithm: str = "RS256") -> None:
        self.key_name = key_name
        self.algorithm = algorithm
        self.key = (
            rsa.generate_private_key(public_exponent=65537, key_size=2048)
            if algorithm == "RS256"
            else ec.generate_private_key(ec.SECP256R1())
        )

    def token(self, pod: PodIdentity, bound: object = None, *, key_name: str | None = None, **changes: object) -> str:
        """Return a signed token of the pod.

        `bound` replaces what Kubernetes says about the pod, and `changes` replace other claims.
        """
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.name,
            "aud": [TOKEN_AUDIENCE],
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
            "sub": f"system:serviceaccount:{pod.namespace}:default",
            "kubernetes.io": bound
            or {
                "namespace": pod.namespace,
                "pod": {"name": pod.pod, "uid": pod.uid},
                "serviceaccount": {"name": "default", "uid": "of the account"},
            },
        }
        return jwt.encode(claims | changes, self.key, self.algorithm, headers={"kid": key_name or self.key_name})

    def public_key(self) -> Manifest:
        """The key as a JSON Web Key Set lists it."""
        public: Any = self.key.public_key()
        algorithm = RSAAlgorithm if self.algorithm == "RS256" else ECAlgorithm
        return {"use": "sig", "kid": self.key_name, "alg": self.algorithm, **algorithm.to_jwk(public, as_dict=True)}

    def published(self, *others: SigningIssuer) -> dict[str, Manifest]:
        """What an API server answers by path that also knows the keys of `others`."""
        return answers(self.name, {"keys": [each.public_key() for each in (self, *others)]})
