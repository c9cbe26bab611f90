"""Where the agent reaches the control API, and whom it trusts there. Both are in files that the kubelet renews."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from spottrain_api.contract.names import FILE_CONTROL_CA, FILE_CONTROL_URL


class AddressMissingError(OSError):
    """The pod does not say where the control API is. The text is a sentence."""


class AuthoritiesUnusableError(OSError):
    """The pod does not say whom to trust there. The text is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoint:
    """Where to send a request.

    Attributes:
        url: The address.
        trust: Whose certificate to accept (`ssl` of aiohttp).
    """

    url: str
    trust: ssl.SSLContext | bool


class ControlAddress:
    """Reads the files for each request. So a new port, scheme or authority needs no new pod."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trust: tuple[str, ssl.SSLContext | bool] = ("", True)

    def read(self) -> ControlEndpoint:
        """The address as it is now.

        Raises:
            AddressMissingError: The folder lacks it.
            AuthoritiesUnusableError: The authorities are not ASCII.
            OSError: A file can't be read, or the authorities can't be parsed.
        """
        url = (self._folder / FILE_CONTROL_URL).read_text().strip().rstrip("/")
        if not url:
            raise AddressMissingError(
                f"{self._folder / FILE_CONTROL_URL} is empty: the annotation of this pod is gone, and the operator "
                "sets it again"
            )
        return ControlEndpoint(url=url, trust=self._trusting((self._folder / FILE_CONTROL_CA).read_text()))

    def _trusting(self, authorities: str) -> ssl.SSLContext | bool:
        if not authorities.isascii():
            raise AuthoritiesUnusableError(
                f"{FILE_CONTROL_CA} is not ASCII: see the certificates in the annotations of this pod, which the "
                "operator sets"
            )
        if authorities != self._trust[0]:
            self._trust = (authorities, ssl.create_default_context(cadata=authorities) if authorities else True)
        return self._trust[1]
