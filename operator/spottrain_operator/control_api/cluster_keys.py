"""Verify service-account tokens with the cluster's public keys.

The API server publishes its issuer and its keys (OpenID Connect discovery, RFC 7517). A token that these keys can
decide on costs no request. All other tokens need a review.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jwt

from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import Manifest

logger = logging.getLogger(__name__)

# Who signs the tokens, and the public keys.
ISSUER_PATH = "/.well-known/openid-configuration"
KEYS_PATH = "/openid/v1/jwks"
# Those with which an API server may sign. None of them takes a public key for a shared secret.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"})
# Keys that were read so long ago are read again before they verify anything.
KEYS_SECONDS = 300.0
# Between two reads, whatever key a token names.
REREAD_SECONDS = 10.0
# An API server has one key, and a few while it changes them.
MAX_KEYS = 100
# As the API server's. A clock may be off by so much.
LEEWAY_SECONDS = 60.0
# The last means that the published key doesn't fit its own algorithm.
LEFT_TO_A_REVIEW = (jwt.InvalidIssuerError, jwt.ImmatureSignatureError, jwt.InvalidKeyError)


class UndecidedError(Exception):
    """The keys can't tell whether a token is valid. A review can."""


class ClusterKeys:
    """Verifies tokens. It reads the cluster's keys when a token needs them.

    `get_raw` reads a path of the API server.
    """

    def __init__(
        self, get_raw: Callable[[str], Awaitable[Manifest]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._get_raw = get_raw
        self._clock = clock
        self._issuer = ""
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._good_until = self._next_read = clock()
        self._reading = asyncio.Lock()
        self._are_readable = True

    async def verify(self, token: str, *, audience: str) -> PodIdentity | None:
        """Find the pod to which the token is bound, as a review does.

        This does not tell whether the pod still exists.

        Returns:
            The pod, or None if the token isn't valid for this audience.

        Raises:
            UndecidedError: The token names a key or an issuer that the API server doesn't publish, or isn't valid
                yet by this clock, or the keys can't be read.
        """
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            content = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["iss", "aud", "exp"]},
            )
            bound = content["kubernetes.io"]
            return PodIdentity(namespace=bound["namespace"], pod=bound["pod"]["name"], uid=bound["pod"]["uid"])
        except (*LEFT_TO_A_REVIEW, KeyError, TypeError) as error:
            raise UndecidedError from error
        except jwt.InvalidTokenError:
            return None

    async def _key(self, name: str | None) -> jwt.PyJWK:
        """The key that a token names.

        One that isn't known may be new, so read the keys again.
        """
        if name not in self._good_keys():
            async with self._reading:
                if self._clock() >= self._next_read:
                    await self._read()
        try:
            return self._good_keys()[name or ""]
        except KeyError as error:
            raise UndecidedError from error

    def _good_keys(self) -> Mapping[str, jwt.PyJWK]:
        return self._keys if self._clock() < self._good_until else {}

    async def _read(self) -> None:
        try:
            discovered = await self._get_raw(ISSUER_PATH)
            keys = keys_of(await self._get_raw(KEYS_PATH))
            self._issuer, self._keys = discovered.get("issuer", ""), keys
            self._good_until = self._clock() + KEYS_SECONDS
            self._are_readable = True
        except (ClusterError, ValueError) as error:
            if self._are_readable:
                logger.warning("the cluster's public keys can't be read, so each token costs a review: %s", error)
            self._are_readable = False
        self._next_read = self._clock() + REREAD_SECONDS


def keys_of(key_set: Manifest) -> Mapping[str, jwt.PyJWK]:
    """Read the keys of a JSON Web Key Set by their names.

    Keys of no use here are left out.

    Raises:
        ValueError: It is no such set, or has more than MAX_KEYS keys.
    """
    listed = key_set.get("keys") if isinstance(key_set, dict) else None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise ValueError(f"{KEYS_PATH} is not a set of at most {MAX_KEYS} keys")
    return {key.key_id: key for each in listed if (key := _parsed(each)) is not None and key.key_id}


def _parsed(listed: Any) -> jwt.PyJWK | None:
    try:
        if listed["alg"] in ALGORITHMS and isinstance(listed["kid"], str):
            return jwt.PyJWK(listed)
    except (jwt.PyJWTError, LookupError, ValueError, TypeError):
        pass
    return None
