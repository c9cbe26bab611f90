"""Tokens that the operator verifies with the cluster's public keys.

The tests show which tokens the keys accept, which they refuse, and which they leave to a review.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm

from pod_tokens import SigningIssuer, answers
from spottrain_api.contract.names import TOKEN_AUDIENCE
from spottrain_operator.control_api.cluster_keys import (
    ISSUER_PATH,
    KEYS_PATH,
    KEYS_SECONDS,
    LEEWAY_SECONDS,
    MAX_KEYS,
    REREAD_SECONDS,
    ClusterKeys,
    UndecidedError,
    keys_of,
)
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import Manifest
from world.cluster import MemoryCluster

POD = PodIdentity(namespace="team", pod="gpt-1", uid="uid-1")
ANOTHER = PodIdentity(namespace="team", pod="gpt-2", uid="uid-2")
ISSUER = SigningIssuer()
NEXT = SigningIssuer("key-2", "ES256")
UNDECIDED = "undecided"


@dataclass
class World:
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    clock: float = 1000.0

    def __post_init__(self) -> None:
        self.cluster.raw = ISSUER.published()
        self.keys = ClusterKeys(self.cluster.get_raw, clock=lambda: self.clock)

    async def found(self, token: str) -> PodIdentity | str | None:
        try:
            return await self.keys.verify(token, audience=TOKEN_AUDIENCE)
        except UndecidedError:
            return UNDECIDED


def encoded(content: Any) -> str:
    return base64.urlsafe_b64encode(content if isinstance(content, bytes) else json.dumps(content).encode()).decode()


def tampered(token: str, *, header: Any = None, claims: Any = None, signature: bytes | None = None) -> str:
    """The token with another part, and its other parts as they were."""
    parts = token.split(".")
    for index, content in enumerate((header, claims, signature)):
        if content is not None:
            parts[index] = encoded(content).rstrip("=")
    return ".".join(parts)


def claims_for(pod: PodIdentity) -> dict[str, Any]:
    claims: dict[str, Any] = jwt.decode(ISSUER.token(pod), options={"verify_signature": False})
    return claims


def signed_with_the_public_key(form: Encoding) -> str:
    """A token whose shared secret is the public key, which everybody knows."""
    kind = PublicFormat.PKCS1 if form is Encoding.DER else PublicFormat.SubjectPublicKeyInfo
    secret = ISSUER.key.public_key().public_bytes(form, kind)
    token = tampered(ISSUER.token(POD), header={"alg": "HS256", "kid": ISSUER.key_name, "typ": "JWT"})
    signed = token.rpartition(".")[0]
    return tampered(token, signature=hmac.digest(secret, signed.encode(), hashlib.sha256))


def now() -> int:
    return int(time.time())


REFUSED = {
    "another audience": ISSUER.token(POD, aud=["vault"]),
    "no audience": ISSUER.token(POD, aud=[]),
    "expired": ISSUER.token(POD, exp=now() - LEEWAY_SECONDS - 5),
    "never expires": ISSUER.token(POD, exp=None),
    "alg none": tampered(ISSUER.token(POD), header={"alg": "none", "kid": ISSUER.key_name}, signature=b""),
    "alg none, with a signature": tampered(ISSUER.token(POD), header={"alg": "none", "kid": ISSUER.key_name}),
    "no alg": tampered(ISSUER.token(POD), header={"kid": ISSUER.key_name}),
    "another alg of the key": tampered(ISSUER.token(POD), header={"alg": "PS256", "kid": ISSUER.key_name}),
    "HMAC with the PEM": signed_with_the_public_key(Encoding.PEM),
    "HMAC with the DER": signed_with_the_public_key(Encoding.DER),
    "another pod": tampered(ISSUER.token(POD), claims=claims_for(ANOTHER)),
    "no signature": tampered(ISSUER.token(POD), signature=b""),
    "a key of the same name": SigningIssuer(ISSUER.key_name).token(POD),
    "a key of another kind and the same name": NEXT.token(POD, key_name=ISSUER.key_name),
    "a header too deep": tampered(ISSUER.token(POD), header=b"[" * 4000),
    "no header": tampered(ISSUER.token(POD), header=b""),
    "a header that is a list": tampered(ISSUER.token(POD), header=[]),
    "a key whose name is a list": tampered(ISSUER.token(POD), header={"alg": "RS256", "kid": []}),
    "an issuer that isn't the cluster, without its key": tampered(
        ISSUER.token(POD), claims=claims_for(POD) | {"iss": "https://elsewhere"}
    ),
}
LEFT_TO_A_REVIEW = {
    "another issuer": ISSUER.token(POD, iss="https://elsewhere"),
    "not yet valid": ISSUER.token(POD, nbf=now() + 100 * LEEWAY_SECONDS),
    "issued in the future": ISSUER.token(POD, iat=now() + 100 * LEEWAY_SECONDS),
    "an unknown key": ISSUER.token(POD, key_name="key-7"),
    "a key without a name": tampered(ISSUER.token(POD), header={"alg": "RS256"}),
    "bound to no pod": ISSUER.token(POD, {"namespace": "team"}),
    "of no service account": ISSUER.token(POD, "nobody"),
}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
async def test_a_token_that_the_cluster_has_signed_is_accepted(algorithm: str) -> None:
    world, issuer = World(), SigningIssuer(algorithm=algorithm)
    world.cluster.raw = issuer.published()
    assert await world.found(issuer.token(POD)) == POD
    assert await world.found(issuer.token(POD, aud=TOKEN_AUDIENCE)) == POD
    assert await world.found(issuer.token(ANOTHER, exp=now() - LEEWAY_SECONDS + 30)) == ANOTHER
    assert world.cluster.num_reads[KEYS_PATH] == 1


@pytest.mark.parametrize("token", REFUSED.values(), ids=REFUSED)
async def test_a_token_that_the_keys_refuse(token: str) -> None:
    assert await World().found(token) is None


@pytest.mark.parametrize("token", LEFT_TO_A_REVIEW.values(), ids=LEFT_TO_A_REVIEW)
async def test_a_token_that_is_left_to_a_review(token: str) -> None:
    assert await World().found(token) == UNDECIDED


async def test_a_new_key_is_read_once_a_token_names_it() -> None:
    world = World()
    assert await world.found(ISSUER.token(POD)) == POD
    world.cluster.raw = ISSUER.published(NEXT)
    assert await world.found(NEXT.token(POD)) == UNDECIDED, "the keys were read just now"
    world.clock += REREAD_SECONDS
    assert await world.found(NEXT.token(POD)) == POD
    assert await world.found(ISSUER.token(POD)) == POD


async def test_a_key_that_has_gone_is_good_for_a_bounded_time() -> None:
    world = World()
    assert await world.found(ISSUER.token(POD)) == POD
    world.cluster.raw = NEXT.published()
    world.clock += KEYS_SECONDS
    assert await world.found(ISSUER.token(POD)) == UNDECIDED


async def test_keys_that_cannot_be_read_again_end_in_time_too(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    assert await world.found(ISSUER.token(POD)) == POD
    world.cluster.raw = {}
    world.clock += KEYS_SECONDS - 1
    assert await world.found(NEXT.token(POD)) == UNDECIDED
    assert await world.found(ISSUER.token(POD)) == POD
    world.clock += 1
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert await world.found(ISSUER.token(POD)) == UNDECIDED
            world.clock += REREAD_SECONDS
    assert len(caplog.records) <= 1, "the log says once that the keys can't be read"
    world.cluster.raw = ISSUER.published()
    assert await world.found(ISSUER.token(POD)) == POD


async def test_unknown_keys_cost_few_reads() -> None:
    world = World()
    for number in range(1000):
        assert await world.found(ISSUER.token(POD, key_name=f"bogus {number}")) == UNDECIDED
        world.clock += REREAD_SECONDS / 100
    assert world.cluster.num_reads[KEYS_PATH] <= 11


class SlowIssuer:
    """Answers once `answer` is set."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def get_raw(self, path: str) -> Manifest:
        if path == ISSUER_PATH:
            await self.asked.put(None)
            await self.answer.wait()
        return ISSUER.published()[path]


async def test_tokens_wait_for_one_read_and_those_with_a_known_key_for_none() -> None:
    clock, issuer = 1000.0, SlowIssuer()
    keys = ClusterKeys(issuer.get_raw, clock=lambda: clock)
    waiting = [asyncio.create_task(keys.verify(ISSUER.token(POD), audience=TOKEN_AUDIENCE)) for _ in range(20)]
    await issuer.asked.get()
    issuer.answer.set()
    assert await asyncio.gather(*waiting) == [POD] * 20
    issuer.answer.clear()
    clock += REREAD_SECONDS
    unknown = asyncio.create_task(keys.verify(NEXT.token(POD), audience=TOKEN_AUDIENCE))
    await issuer.asked.get()
    assert await keys.verify(ISSUER.token(POD), audience=TOKEN_AUDIENCE) == POD
    unknown.cancel()
    await asyncio.wait({unknown})
    again = asyncio.create_task(keys.verify(NEXT.token(POD), audience=TOKEN_AUDIENCE))
    await issuer.asked.get()
    issuer.answer.set()
    with pytest.raises(UndecidedError):
        await again
    assert issuer.asked.empty()


UNUSABLE: list[Any] = [
    *(None, [], "keys", {}, {"keys": None}, {"keys": {}}, {"keys": "abc"}),
    {"keys": [ISSUER.public_key()] * (MAX_KEYS + 1)},
]


@pytest.mark.parametrize("key_set", UNUSABLE, ids=range(len(UNUSABLE)))
async def test_a_set_of_keys_that_makes_no_sense_verifies_nothing(key_set: Any) -> None:
    world = World()
    world.cluster.raw = answers(ISSUER.name, key_set)
    assert await world.found(ISSUER.token(POD)) == UNDECIDED


USELESS: list[Any] = [
    *(None, 7, [], {}, {"kid": "key-1"}, {"kid": [], "alg": "RS256"}, {"kid": "key-1", "alg": ["RS256"]}),
    ISSUER.public_key() | {"alg": "none"},
    ISSUER.public_key() | {"alg": "HS256"},
    ISSUER.public_key() | {"alg": "ES256"},
    ISSUER.public_key() | {"kid": ["key-1"]},
    ISSUER.public_key() | {"n": 7},
    ISSUER.public_key() | {"n": "!"},
    NEXT.public_key() | {"x": "AA"},
    {"kid": "key-1", "alg": "HS256", "kty": "oct", "k": "AAAA"},
    {"kid": "key-1", "alg": "RS256", "kty": "oct", "k": "AAAA"},
]


@pytest.mark.parametrize("useless", USELESS, ids=range(len(USELESS)))
def test_keys_of_no_use_are_left_out(useless: Any) -> None:
    good = SigningIssuer("good", "ES256").public_key()
    assert list(keys_of({"keys": [useless, good]})) == ["good"]


async def test_a_key_that_does_not_fit_its_algorithm_verifies_nothing() -> None:
    curve = ec.generate_private_key(ec.SECP384R1()).public_key()
    world = World()
    key = NEXT.public_key() | ECAlgorithm.to_jwk(curve, as_dict=True)
    world.cluster.raw = answers(NEXT.name, {"keys": [key]})
    assert await world.found(NEXT.token(POD)) == UNDECIDED


async def test_an_issuer_without_a_name_verifies_nothing() -> None:
    world = World()
    world.cluster.raw = answers("", ISSUER.published()[KEYS_PATH])
    assert await world.found(ISSUER.token(POD)) == UNDECIDED
