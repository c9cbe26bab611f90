"""Ask the API server which pod a token belongs to (TokenReview)."""

from __future__ import annotations

from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import TOKEN_REVIEWS, Manifest

EXTRA_POD_NAME = "authentication.kubernetes.io/pod-name"
EXTRA_POD_UID = "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


async def review_token(cluster: Cluster, token: str, *, audience: str) -> PodIdentity | None:
    """The pod to which the token is bound; None if the token isn't valid for this audience."""
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [audience]},
    }
    answer = await cluster.create(TOKEN_REVIEWS, review)
    return _pod_identity(answer.get("status", {}), audience)


def _pod_identity(status: Manifest, audience: str) -> PodIdentity | None:
    """The pod to which a token is bound, from the status of its TokenReview; None if it is bound to no pod."""
    if not status.get("authenticated") or audience not in status.get("audiences", ()):
        return None
    user = status.get("user", {})
    extra: dict[str, list[str]] = user.get("extra") or {}
    names, uids = extra.get(EXTRA_POD_NAME, []), extra.get(EXTRA_POD_UID, [])
    username = user.get("username", "")
    if len(names) != 1 or len(uids) != 1 or not username.startswith(SERVICE_ACCOUNT_PREFIX):
        return None
    namespace = str(username).removeprefix(SERVICE_ACCOUNT_PREFIX).partition(":")[0]
    return PodIdentity(namespace=namespace, pod=names[0], uid=uids[0])
