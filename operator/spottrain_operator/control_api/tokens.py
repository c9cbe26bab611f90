"""Which pod sends a request, by its token.

Everything that can be read comes first: form, audience, expiry, and whether the operator has that pod at all. These
claims are not verified. They only refuse. The cluster's public keys decide who a pod is. Only if they can't, a review
asks the API server, which costs a request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_operator.control_api.cluster_keys import KEYS_SECONDS, LEEWAY_SECONDS, ClusterKeys, UndecidedError
from spottrain_operator.control_api.rate_limit import RateLimit
from spottrain_operator.kube.identities import PodIdentity
from spottrain_runtime.wording import one_line

# A token that was accepted stays so until it expires, or its pod is gone, but no longer than this. One that the keys
# have verified is verified again, as keys change. Refusals are cached briefly, against floods.
MAX_ACCEPTED_SECONDS = 3600.0
MAX_VERIFIED_SECONDS = KEYS_SECONDS
REFUSED_SECONDS = 5.0
MAX_CHECKED = 20_000
# Checks of tokens that were never accepted, for each source. The burst is for pods that share an address and come
# back together, after a restart of the operator.
CHECKS_PER_SECOND = 10.0
CHECKS_BURST = 100
# Checks that wait for the keys, or for a connection. More than that would take longer than an agent waits for its
# answer.
MAX_PENDING_CHECKS = 200
# Tokens of service accounts have about a thousand characters.
MAX_TOKEN_LENGTH = 8192


class TokenRefusedError(Exception):
    """The token is not accepted. The text is a sentence."""


class NotOurPodError(TokenRefusedError):
    """The token is of a pod that the operator does not have."""


class TooManyTokensError(TokenRefusedError):
    """The token can't be checked now, because too many others have to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClaims:
    """What a token says about itself."""

    audiences: frozenset[str]
    expires_at: float
    pod: str
    pod_uid: str


def claims_of(token: str) -> TokenClaims:
    """Read a token of a service account without verifying it (RFC 7519).

    Raises:
        TokenRefusedError: It is not a token that Kubernetes bound to a pod.
    """
    try:
        if len(token) > MAX_TOKEN_LENGTH or not token.isascii():
            raise ValueError
        _, payload, _ = token.split(".")
        content: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        audiences, pod = content["aud"], content["kubernetes.io"]["pod"]
        return TokenClaims(
            audiences=frozenset([audiences] if isinstance(audiences, str) else map(str, audiences)),
            expires_at=float(content["exp"]),
            pod=str(pod["name"]),
            pod_uid=str(pod["uid"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, binascii.Error, RecursionError) as error:
        raise TokenRefusedError(
            "the token isn't one that Kubernetes bound to a pod: send the pod's projected service-account token"
        ) from error


class TokenGate:
    """Finds the pod of each token, with few reviews or none.

    Args:
        review: Asks the API server which pod a token belongs to. None: to none.
        keys: Verify tokens without it.
        is_ours: Whether the operator has the pod with a uid.
    """

    def __init__(
        self,
        review: Callable[[str], Awaitable[PodIdentity | None]],
        keys: ClusterKeys,
        is_ours: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._review = review
        self._keys = keys
        self._is_ours = is_ours
        self._clock = clock
        self._limit = RateLimit(per_second=CHECKS_PER_SECOND, burst=CHECKS_BURST, clock=clock)
        self._checked: OrderedDict[bytes, tuple[float, PodIdentity | None]] = OrderedDict()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._num_pending = 0

    async def identify(self, token: str, source: str) -> PodIdentity:
        """Find the pod that the token is bound to.

        `source` is the address that the token comes from.

        Raises:
            TokenRefusedError: The token isn't valid, or not for this, or not of a pod that the operator has.
            TooManyTokensError: Too many tokens come, from this source or from all.
            ClusterError: The token can't be checked now.
        """
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        expires, pod = self._checked.get(key, (0.0, None))
        if self._clock() >= expires:
            self._check_claims(claims_of(token))
            if pod is None and not self._limit.allows(source):
                raise TooManyTokensError(f"too many unknown tokens come from {source}; retry in a second")
            pod = await self._check(key, token)
        if pod is None:
            raise TokenRefusedError(
                f"the cluster does not accept the token for the audience '{TOKEN_AUDIENCE}': it isn't valid, or "
                "its pod is deleted"
            )
        self._check_pod(pod.pod, pod.uid)
        return pod

    def _check_claims(self, claims: TokenClaims) -> None:
        if TOKEN_AUDIENCE not in claims.audiences:
            audiences = one_line(", ".join(sorted(claims.audiences)), most=100)
            raise TokenRefusedError(
                f"the token is for the audience '{audiences}', not '{TOKEN_AUDIENCE}': send the token that the "
                "operator has projected into the pod"
            )
        late = time.time() - claims.expires_at
        if not late < LEEWAY_SECONDS:
            raise TokenRefusedError(
                f"the token expired {late:.0f} s ago: read its file again, which the kubelet renews"
            )
        self._check_pod(claims.pod, claims.pod_uid)

    def _check_pod(self, pod: str, uid: str) -> None:
        if not self._is_ours(uid):
            raise NotOurPodError(
                f"the operator has no pod {one_line(pod, most=100)} ({one_line(uid, most=40)}) of a TrainingJob: it "
                "is not one of its own, is deleted, or was not observed yet"
            )

    async def _check(self, key: bytes, token: str) -> PodIdentity | None:
        """Check a token; if another request does so already, wait for its result."""
        if self._num_pending >= MAX_PENDING_CHECKS:
            raise TooManyTokensError("too many tokens wait to be checked; retry in a second")
        self._num_pending += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                expires, pod = self._checked.get(key, (0.0, None))
                if self._clock() < expires:
                    return pod
                pod, most = await self._decided(token)
                self._checked.pop(key, None)
                left = claims_of(token).expires_at - time.time()
                seconds = min(most, left) if pod else REFUSED_SECONDS
                self._checked[key] = (self._clock() + seconds, pod)
                if len(self._checked) > MAX_CHECKED:
                    self._checked.popitem(last=False)
                return pod
        finally:
            self._num_pending -= 1

    async def _decided(self, token: str) -> tuple[PodIdentity | None, float]:
        """The pod of a token, and for how many seconds at most that holds."""
        try:
            return await self._keys.verify(token, audience=TOKEN_AUDIENCE), MAX_VERIFIED_SECONDS
        except UndecidedError:
            return await self._review(token), MAX_ACCEPTED_SECONDS
