"""What a request to the cluster can end with, other than an answer."""

from __future__ import annotations

from collections.abc import Mapping

# The API server asks for a second or so, and a proxy before it may ask for an hour.
MAX_RETRY_AFTER_SECONDS = 30.0


class ClusterError(Exception):
    """The API server failed or could not be reached. A later attempt may succeed.

    `retry_after` is the number of seconds that the API server asks to wait, if it does.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConflictError(ClusterError):
    """The object has changed since it was read, or has a different uid.

    The API server's optimistic lock refused the write.
    """


class NotFoundError(ClusterError):
    """The object doesn't exist."""


class AlreadyExistsError(ClusterError):
    """An object of that name exists already."""


class ExpiredError(ClusterError):
    """The API server no longer knows what has happened since a version. List again."""


class RefusedError(ClusterError):
    """The API server has read the object, and refuses it."""


class InvalidObjectError(RefusedError):
    """The API server refused the object for its content.

    A rule of Kubernetes or an admission webhook forbids it.
    """


class ForbiddenError(RefusedError):
    """Refused for the state of the cluster.

    Something that the object names is missing, a quota is used up, the namespace's policy forbids it, or a webhook
    doesn't answer.
    """


class NoPoolError(RefusedError):
    """The job's pools have no place for a pod.

    The message is a sentence for the user.
    """


class NotAllowedError(RefusedError):
    """The administrator doesn't allow what the job asks for.

    The message is a sentence for the user.
    """


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of the header Retry-After, if there is one, up to 30.

    The API server sends it with 429, and sometimes with 503.
    """
    try:
        return min(max(0.0, float(headers.get("Retry-After", ""))), MAX_RETRY_AFTER_SECONDS)
    except ValueError:
        return None
