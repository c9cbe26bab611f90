"""The log of a healthy operator has no errors."""

from __future__ import annotations

import logging

import pytest

from spottrain_operator.command import retry_is_no_error

RETRY = "Request attempt 1 failed; will retry: GET /apis -> APITooManyRequestsError('storage is (re)initializing')"


@pytest.mark.parametrize(
    ("name", "message", "level"),
    [
        ("kopf._cogs.clients.api", RETRY, "WARNING"),
        ("kopf._cogs.clients.api", RETRY.replace("will retry", "escalating"), "ERROR"),
        ("spottrain_operator.reconcile", RETRY, "ERROR"),
    ],
    ids=["kopf retries", "kopf gives up", "another logger"],
)
def test_a_request_that_is_repeated_is_no_error(name: str, message: str, level: str) -> None:
    record = logging.LogRecord(name, logging.ERROR, __file__, 1, message, None, None)
    assert retry_is_no_error(record), "it is still logged"
    assert record.levelname == level
