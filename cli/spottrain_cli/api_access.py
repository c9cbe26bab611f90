"""Access to the Kubernetes API: the client, and what refusals mean to a user."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from urllib3 import Retry
from urllib3.exceptions import HTTPError

from spottrain_runtime.wording import printable

# An API server that restarts, or elects its store's leader, is back in less.
OUTAGE_SECONDS = 60.0
CONNECT_SECONDS = 5.0
# An API server that has said nothing for so long does not answer.
READ_SECONDS = 30.0

T = TypeVar("T")


class UserError(Exception):
    """A mistake or a fault that the user can correct.

    The text is a sentence that says how.
    """


class NotThere(UserError):
    """The requested object does not exist."""


class Forbidden(UserError):
    """The user of the kubeconfig may not read the requested object."""


class Unanswered(UserError):
    """The API server can't answer now. The next request may succeed."""


def connect(kubeconfig: str | None) -> tuple[Any, str]:
    """Choose the cluster as kubectl does, without a request.

    Returns:
        A client of its API, and the namespace of the context.

    Raises:
        UserError: There is no kubeconfig, or it can't be read.
    """
    from kubernetes import client, config
    from kubernetes.config.kube_config import KubeConfigMerger
    from yaml import YAMLError

    path = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        merged = KubeConfigMerger(path)
        # Of several files, the client takes the last one's, and kubectl the first one that is not empty.
        named = (file.get("current-context") for file in merged.config_files.values())
        context = next(filter(None, named), None)
        settings: Any = client.Configuration()
        settings.retries = Retry(3, read=0)  # `answers` tries again, and says so
        config.load_kube_config(config_file=path, context=context, client_configuration=settings)
        # kubectl asks the environment's proxy for no address of this machine. The kubeconfig's own stays.
        if _is_loopback(settings.host) and settings.proxy in getproxies().values():
            settings.proxy = None
        active = merged.config["contexts"].get_with_name(context)["context"]
        return client.ApiClient(settings), active.safe_get("namespace") or "default"
    except (config.ConfigException, YAMLError, OSError, ValueError, AttributeError, TypeError) as error:
        # The client walks through what it has parsed: of a text or a list, it misses methods.
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, AttributeError | TypeError):
            said = "It holds no kubeconfig"
        said = said.removeprefix("Invalid kube-config file. ").removesuffix(".")
        raise UserError(
            f"No cluster to talk to: kubeconfig {path}: {said}. Set KUBECONFIG, or start a cluster with "
            "`spottrain local up`."
        ) from error


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def sentences(missing: str | None = None) -> Iterator[None]:
    """Turn errors of the API into UserErrors.

    Status 404 becomes NotThere with the text `missing`, and 403 becomes Forbidden.
    """
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        if missing is not None and error.status == 404:
            raise NotThere(missing) from error
        if error.status == 429 or error.status >= 500:
            raise Unanswered(
                f"The API server can't answer now: {_said(error)}. If that lasts, check the cluster."
            ) from error
        kind = Forbidden if error.status == 403 else UserError
        raise kind(
            f"The API server refused the request: {_said(error)}. `kubectl auth can-i --list` shows your rights."
        ) from error
    except HTTPError as error:
        raise Unanswered(
            f"The API server does not answer ({error}). Check that the cluster runs (`spottrain local status`) and "
            "that KUBECONFIG names it."
        ) from error


def _said(error: Any) -> str:
    """What the API server says of an ApiException, with the status."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, LookupError):
        message = error.reason
    return f"{printable(str(message))} ({error.status})"


def answers(read: Callable[[], T], *, every: float, remark: Callable[[str], None]) -> Iterator[T]:
    """Read again and again, also over an outage of the API server.

    Args:
        read: Reads once.
        every: Seconds between two reads.
        remark: Prints a sentence. Each outage is one.

    Raises:
        UserError: The first read fails, or a later one is refused.
        Unanswered: The outage lasts longer than `OUTAGE_SECONDS`.
    """
    yield read()
    failing_since = None
    while True:
        time.sleep(every)
        try:
            answer = read()
        except Unanswered as error:
            if failing_since is None:
                failing_since = time.monotonic()
                remark(f"{error} Trying again for {OUTAGE_SECONDS:.0f} s.")
            elif time.monotonic() - failing_since >= OUTAGE_SECONDS:
                raise
        else:
            failing_since = None
            yield answer
