"""What the API server's refusals mean to the operator."""

from __future__ import annotations

import json

import pytest

from spottrain_operator.kube.api_server import refusal
from spottrain_operator.kube.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
)


def test_what_the_api_server_or_a_proxy_asks_to_wait() -> None:
    for headers, seconds in (
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "3600"}, 30.0),
        ({"Retry-After": "inf"}, 30.0),
        ({"Retry-After": "Mon, 01 Jan"}, None),
        ({}, None),
    ):
        assert refusal(429, headers, "Too Many Requests").retry_after == seconds


WEBHOOK = 'admission webhook "policy.example.com" denied the request: no team label'
POLICY = "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no team label"


@pytest.mark.parametrize(
    ("status", "reason", "message", "kind", "said"),
    [
        (403, "Forbidden", 'pods "gpt-7" is forbidden: exceeded quota: team', ForbiddenError, "exceeded quota: team"),
        (422, "Invalid", 'Pod "gpt-7" is invalid: spec: Required value', InvalidObjectError, "spec: Required value"),
        (422, "Invalid", 'pods "gpt-7" is forbidden: a policy denied it', InvalidObjectError, "a policy denied it"),
        (400, "BadRequest", WEBHOOK, InvalidObjectError, WEBHOOK),
        (409, "Conflict", WEBHOOK, InvalidObjectError, WEBHOOK),
        (500, "InternalError", WEBHOOK, InvalidObjectError, WEBHOOK),
        (413, "RequestEntityTooLarge", f'pods "gpt-7" is forbidden: {POLICY}', InvalidObjectError, POLICY),
        (500, "InternalError", 'failed calling webhook "x": timeout', ForbiddenError, 'failed calling webhook "x"'),
        (500, "InternalError", "etcd is down", ClusterError, "the API server answered 500: etcd is down"),
        (409, "AlreadyExists", "there is one", AlreadyExistsError, "there is one"),
        (409, "Conflict", "it was modified", ConflictError, "it was modified"),
        (404, "NotFound", "no such pod", NotFoundError, "no such pod"),
        (410, "Expired", "too old resource version", ExpiredError, "too old resource version"),
    ],
)
def test_errors(status: int, reason: str, message: str, kind: type[ClusterError], said: str) -> None:
    found = refusal(status, {}, json.dumps({"message": message, "reason": reason}))
    assert type(found) is kind
    assert str(found).startswith(said)


def test_a_refusal_that_is_not_the_api_servers_keeps_its_text() -> None:
    assert str(refusal(502, {}, "<h1>Bad Gateway</h1>")) == "the API server answered 502: <h1>Bad Gateway</h1>"
    assert str(refusal(503, {}, "")) == "the API server answered 503: no reason was given"
