"""Bodies of requests in pieces, for the stores whose clients send with `requests`."""

from __future__ import annotations

from typing import Any

import requests
from requests.adapters import BaseAdapter

from spottrain.checkpoint.stores.upload_body import UploadBody


class InPieces(BaseAdapter):
    """Sends bodies in pieces, by an adapter of requests.

    The connect timeout holds for each piece. Sent at once, the whole body would have to be taken within it.
    """

    def __init__(self, adapter: BaseAdapter) -> None:
        super().__init__()
        self._adapter = adapter

    def send(self, request: Any, **options: Any) -> requests.Response:  # type: ignore[override]
        if isinstance(request.body, bytes | memoryview):
            request = request.copy()  # the original may be sent again
            request.body = UploadBody(memoryview(request.body))
        return self._adapter.send(request, **options)

    def close(self) -> None:
        self._adapter.close()


def send_in_pieces(session: requests.Session) -> None:
    """Let a session send all bodies in pieces, by the adapters that it has."""
    for scheme in list(session.adapters):
        session.mount(scheme, InPieces(session.get_adapter(scheme)))
