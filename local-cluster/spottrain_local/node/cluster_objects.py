"""The objects that pods refer to: ConfigMaps, Secrets, service account tokens."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from spottrain_local.node.api import ApiClient, ApiError, JSONObject


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Request for a token of a pod's service account, bound to the pod.

    An empty audience is the API server's own.
    """

    namespace: str
    service_account: str
    pod_name: str
    pod_uid: str
    audience: str
    expiration_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An issued token."""

    value: str
    issued: datetime
    expires: datetime

    def wants_refresh(self, now: datetime) -> bool:
        """Return whether 80% of its lifetime or a day is over, as a kubelet decides it."""
        age = (now - self.issued).total_seconds()
        return age > min(86400.0, 0.8 * (self.expires - self.issued).total_seconds())


class ObjectSource(Protocol):
    """Reads the objects to which pods refer."""

    async def config_map(self, namespace: str, name: str) -> JSONObject | None:
        """Return the ConfigMap, or None if it does not exist."""
        ...

    async def secret(self, namespace: str, name: str) -> JSONObject | None:
        """Return the Secret, or None if it does not exist."""
        ...

    async def token(self, request: TokenRequest) -> Token:
        """Return a fresh token."""
        ...


class ApiObjectSource:
    """Reads from the API server as the node.

    The Node authorizer allows the objects to which its pods refer.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def config_map(self, namespace: str, name: str) -> JSONObject | None:
        return await self._find(f"/api/v1/namespaces/{namespace}/configmaps/{name}")

    async def secret(self, namespace: str, name: str) -> JSONObject | None:
        return await self._find(f"/api/v1/namespaces/{namespace}/secrets/{name}")

    async def _find(self, path: str) -> JSONObject | None:
        try:
            return await self._client.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def token(self, request: TokenRequest) -> Token:
        spec: JSONObject = {
            "expirationSeconds": request.expiration_seconds,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": request.pod_name,
                "uid": request.pod_uid,
            },
        }
        if request.audience:
            spec["audiences"] = [request.audience]
        path = f"/api/v1/namespaces/{request.namespace}/serviceaccounts/{request.service_account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        status = (await self._client.create(path, body))["status"]
        expires = datetime.fromisoformat(status["expirationTimestamp"])
        return Token(value=status["token"], issued=datetime.now(UTC), expires=expires)
