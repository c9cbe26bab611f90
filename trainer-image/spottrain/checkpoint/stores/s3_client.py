"""S3 clients that share what botocore reads about the service. To read it takes 0.1 s of a processor."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import boto3
import botocore.session
from botocore.exceptions import BotoCoreError

# The metadata server of a busy node is slow. botocore's defaults, a single try of 1 s, then find no credentials.
_METADATA_SERVER = {
    "metadata_service_timeout": ("metadata_service_timeout", "AWS_METADATA_SERVICE_TIMEOUT", 5, int),
    "metadata_service_num_attempts": ("metadata_service_num_attempts", "AWS_METADATA_SERVICE_NUM_ATTEMPTS", 3, int),
}


@cache
def _loader() -> Any:
    return botocore.session.Session().get_component("data_loader")


def s3_client(**settings: Any) -> Any:
    """A client with a session of its own, because sessions keep credentials.

    `settings`: those of `Session.client`.
    """
    session = botocore.session.Session(session_vars=_METADATA_SERVER)
    session.register_component("data_loader", _loader())
    return boto3.session.Session(botocore_session=session).client("s3", **settings)


# Ranks are forked from a process that has imported this module. Whoever uses AWS reports errors of its configuration.
with contextlib.suppress(BotoCoreError):
    s3_client(region_name="us-east-1", aws_access_key_id="nobody", aws_secret_access_key="none")
