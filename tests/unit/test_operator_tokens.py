"""Tokens at the control API.

The tests show what is refused without a review, and what a flood of bogus tokens costs.
"""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass, field, replace

import pytest

from pod_tokens import SigningIssuer, pod_token
from spottrain_operator.control_api.cluster_keys import KEYS_SECONDS, ClusterKeys
from spottrain_operator.control_api.rate_limit import RateLimit
from spottrain_operator.control_api.tokens import (
    CHECKS_BURST,
    MAX_PENDING_CHECKS,
    REFUSED_SECONDS,
    TokenGate,
    TokenRefusedError,
    TooManyTokensError,
    claims_of,
)
from spottrain_operator.kube.identities import PodIdentity
from world.cluster import MemoryCluster

POD = PodIdentity(namespace="team", pod="gpt-1", uid="uid-1")
TOKEN = pod_token(POD)


@dataclass
class Reviews:
    """Accepts TOKEN alone; answers once `answer` is set."""

    answer: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[str] = field(default_factory=list)
    started: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def __call__(self, token: str) -> PodIdentity | None:
        self.tokens.append(token)
        await self.started.put(token)
        await self.answer.wait()
        return POD if token == TOKEN else None


@dataclass
class Gate:
    reviews: Reviews = field(default_factory=Reviews)
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    ours: set[str] = field(default_factory=lambda: {POD.uid})
    clock: float = 1000.0

    def __post_init__(self) -> None:
        self.reviews.answer.set()
        keys = ClusterKeys(self.cluster.get_raw, clock=lambda: self.clock)
        self.gate = TokenGate(self.reviews, keys, self.ours.__contains__, clock=lambda: self.clock)

    async def refusal(self, token: str, source: str = "10.0.0.1") -> str:
        with pytest.raises(TokenRefusedError) as refused:
            await self.gate.identify(token, source)
        return type(refused.value).__name__


CLAIMS_WITHOUT_END = b'{"aud": "spottrain", "exp": 1%b, "kubernetes.io": {"pod": {"name": "a", "uid": "b"}}}'
TOO_LATE = base64.urlsafe_b64encode(CLAIMS_WITHOUT_END % (b"0" * 400)).decode()
BAD_TOKENS = [
    *("", ".", "a.b.c", "é.é.é", "x" * 100_000, "a.e30.c", "a.W10.c", "a.bnVsbA.c"),
    *(f"\udcff{TOKEN}", f"{TOKEN}\udcff"),
    *("a.eyJhdWQiOiBbInNwb3R0cmFpbiJdfQ.c", f"a.{'W1tb' * 2000}.c"),
    pod_token(POD, seconds="soon"),
    pod_token(POD, audience="vault"),
    pod_token(POD, audience=["spottrain"]),
    pod_token(POD, audience={"spottrain": 1}),
    pod_token(POD, seconds=-600),
    pod_token(POD, seconds=float("nan")),
    f"a.{TOO_LATE}.c",
    pod_token(PodIdentity(namespace="team", pod="gpt-1", uid="uid-2")),
]


@pytest.mark.parametrize("token", BAD_TOKENS, ids=range(len(BAD_TOKENS)))
async def test_what_can_be_read_costs_no_review(token: str) -> None:
    gate = Gate()
    assert await gate.refusal(token) in ("TokenRefusedError", "NotOurPodError")
    assert gate.reviews.tokens == []


def test_the_claims_of_a_token() -> None:
    before = time.time()
    claims = claims_of(pod_token(POD, seconds=3600))
    assert (claims.pod, claims.pod_uid, claims.audiences) == ("gpt-1", "uid-1", frozenset({"spottrain"}))
    assert before + 3600 <= claims.expires_at <= time.time() + 3600


async def test_requests_with_one_token_wait_for_one_review() -> None:
    gate = Gate()
    gate.reviews.answer.clear()
    asking = [asyncio.create_task(gate.gate.identify(TOKEN, "10.0.0.1")) for _ in range(20)]
    await gate.reviews.started.get()
    gate.reviews.answer.set()
    assert await asyncio.gather(*asking) == [POD] * 20
    assert gate.reviews.tokens == [TOKEN]


async def test_a_flood_from_one_source_costs_few_reviews_and_no_other_source_notices() -> None:
    gate = Gate()
    for number in range(3000):
        gate.clock += 0.001
        await gate.refusal(pod_token(POD, name=f"bogus {number}"))
    assert len(gate.reviews.tokens) <= CHECKS_BURST + 31
    assert await gate.gate.identify(TOKEN, "10.0.0.2") == POD


async def test_a_pod_that_shares_its_address_with_a_flood_is_heard_on() -> None:
    gate = Gate()
    assert await gate.gate.identify(TOKEN, "10.0.0.1") == POD
    for number in range(CHECKS_BURST):
        await gate.refusal(pod_token(POD, name=f"bogus {number}"))
    assert await gate.refusal(pod_token(POD, name="one more")) == "TooManyTokensError"
    gate.clock += 3600
    for number in range(CHECKS_BURST):
        await gate.refusal(pod_token(POD, name=f"again {number}"))
    assert await gate.gate.identify(TOKEN, "10.0.0.1") == POD


async def test_one_bogus_token_is_reviewed_once_in_a_while() -> None:
    gate = Gate()
    bogus = pod_token(POD, name="bogus")
    for _ in range(50):
        assert await gate.refusal(bogus) == "TokenRefusedError"
    assert len(gate.reviews.tokens) == 1
    gate.clock += REFUSED_SECONDS
    await gate.refusal(bogus)
    assert len(gate.reviews.tokens) == 2


async def test_a_token_that_the_keys_decide_on_costs_no_review() -> None:
    gate, issuer = Gate(), SigningIssuer()
    gate.cluster.raw = issuer.published()
    token = issuer.token(POD)
    assert await gate.gate.identify(token, "10.0.0.1") == POD
    assert await gate.refusal(SigningIssuer().token(POD)) == "TokenRefusedError"
    gate.ours.clear()
    assert await gate.refusal(token) == "NotOurPodError"
    assert await gate.refusal(issuer.token(POD, jti="not seen before")) == "NotOurPodError"
    assert gate.reviews.tokens == []


async def test_a_pod_of_another_uid_is_refused_whatever_its_name() -> None:
    gate, issuer = Gate(), SigningIssuer()
    gate.cluster.raw = issuer.published()
    assert await gate.refusal(issuer.token(replace(POD, uid="uid-2"))) == "NotOurPodError"


async def test_a_flood_of_bad_signatures_is_bounded_like_one_of_reviews() -> None:
    """A pod behind the same address, which was heard before, is heard on."""
    gate, issuer, bogus = Gate(), SigningIssuer(), SigningIssuer()
    gate.cluster.raw = issuer.published()
    token = issuer.token(POD)
    assert await gate.gate.identify(token, "10.0.0.1") == POD
    refused = [await gate.refusal(bogus.token(POD, jti=f"{number}")) for number in range(CHECKS_BURST)]
    assert (refused.count("TokenRefusedError"), refused[-1]) == (CHECKS_BURST - 1, "TooManyTokensError")
    gate.clock += KEYS_SECONDS
    for number in range(CHECKS_BURST):
        await gate.refusal(bogus.token(POD, jti=f"again {number}"))
    assert await gate.gate.identify(token, "10.0.0.1") == POD
    assert gate.reviews.tokens == []


async def test_a_verified_token_is_verified_again_as_keys_change() -> None:
    gate, issuer = Gate(), SigningIssuer()
    gate.cluster.raw = issuer.published()
    token = issuer.token(POD)
    assert await gate.gate.identify(token, "10.0.0.1") == POD
    gate.cluster.raw = SigningIssuer("key-2").published()
    gate.clock += KEYS_SECONDS
    assert await gate.refusal(token) == "TokenRefusedError"
    assert gate.reviews.tokens == [token], "the API server decides on a key that it doesn't publish"


async def test_reviews_that_wait_are_bounded() -> None:
    gate = Gate()
    gate.reviews.answer.clear()
    waiting = [
        asyncio.create_task(gate.gate.identify(pod_token(POD, name=f"{n}"), f"10.0.1.{n}"))
        for n in range(MAX_PENDING_CHECKS)
    ]
    for _ in waiting:
        await gate.reviews.started.get()
    with pytest.raises(TooManyTokensError, match="too many tokens wait to be checked; retry in a second"):
        await gate.gate.identify(TOKEN, "10.0.0.1")
    gate.reviews.answer.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, TokenRefusedError) for each in results)
    assert await gate.gate.identify(TOKEN, "10.0.0.1") == POD


def test_a_source_passes_in_bursts_and_then_at_its_rate() -> None:
    now = 0.0
    limit = RateLimit(per_second=2.0, burst=3, clock=lambda: now)
    passed = []
    for tenth in range(31):
        now = tenth / 10
        if limit.allows("a"):
            passed.append(tenth)
    assert passed == [0, 1, 2, 5, 10, 15, 20, 25, 30]
    assert limit.allows("b")


def test_a_source_that_has_overspent_waits_until_that_is_made_up_for() -> None:
    now = 0.0
    limit = RateLimit(per_second=0.1, burst=20, clock=lambda: now)
    limit.spend("a", 20.0)
    assert not limit.is_overspent("a")
    limit.spend("a", 0.1)
    assert limit.is_overspent("a")
    assert not limit.is_overspent("b")
    now = 1.0
    assert not limit.is_overspent("a")
