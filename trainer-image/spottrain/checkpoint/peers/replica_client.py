"""Client of the members that hold replicated shards. spottrain_agent/replica_store.py is the server."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from spottrain.checkpoint.errors import ObjectNotFound, StorageDenied, StorageUnavailable
from spottrain.checkpoint.format.manifest import data_key, receipt_key
from spottrain.checkpoint.stores.storage import Buffer
from spottrain_api.contract.names import PROCESSOR_SECONDS
from spottrain_api.contract.replicas import HeldShards, ReplicatedStep

# How long a member may take for a piece of an object, and then to answer.
TIMEOUT_SECONDS = 10.0
_PIECE_BYTES = 1 << 20


def prefix(generation: int, sequence: int) -> str:
    """Prefix of a replicated step's objects, like an attempt's in a store."""
    return f"{generation}/{sequence}/"


def state_key(attempt: str) -> str:
    """Key of the state other than tensors. Rank 0 writes it beside its shard."""
    return f"{attempt}state.json"


class ReplicaClient:
    """One member that holds replicas.

    Raises StorageUnavailable if it can't be reached, StorageDenied if it refuses.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {token}"}

    def put(self, objects: dict[str, Buffer], step: HeldShards) -> float:
        """Send these objects, and then report that the step is complete for its ranks.

        Returns:
            Processor time that the member spent, in seconds.
        """
        seconds = 0.0
        with self._connected() as connection:
            for key, data in objects.items():
                answer = self._ask(connection, "PUT", f"/{key}", data)
                answer.read()
                seconds += float(answer.headers.get(PROCESSOR_SECONDS, "0"))
            self._ask(connection, "POST", "/held", step.to_json().encode()).read()
        return seconds

    def get(self, key: str) -> bytes:
        """Read an object. Raises ObjectNotFound."""
        with self._connected() as connection:
            return self._ask(connection, "GET", f"/{key}").read()

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        """Read a part of an object, as `CheckpointStorage.read_into` does. Raises ObjectNotFound."""
        wanted = {"Range": f"bytes={offset}-{offset + len(memory) - 1}"}
        filled = 0
        with self._connected() as connection:
            answer = self._ask(connection, "GET", f"/{key}", headers=wanted)
            while filled < len(memory) and (length := answer.readinto(memory[filled:])):
                filled += length
        return filled

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Buffer | None = None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        length = {} if body is None else {"Content-Length": str(len(body))}
        pieces = None if body is None else _pieces(memoryview(body))
        connection.request(method, path, body=pieces, headers={**self._headers, **length, **(headers or {})})
        answer = connection.getresponse()
        if answer.status == HTTPStatus.NOT_FOUND:
            raise ObjectNotFound(path.lstrip("/"))
        if answer.status == HTTPStatus.FORBIDDEN:
            raise StorageDenied(
                f"The replicas that the member at {self.address} holds are not open to this generation."
            )
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise StorageUnavailable(
                f"The member at {self.address} answered {answer.status} when asked for replicas."
            )
        return answer

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_SECONDS)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise StorageUnavailable(f"The member at {self.address} can't be reached: {error}.") from error
        finally:
            connection.close()


def _pieces(data: memoryview) -> Iterator[memoryview]:
    """The data in pieces, for each of which the timeout holds.

    Sent at once, the whole shard would have to arrive within it.
    """
    for begin in range(0, len(data), _PIECE_BYTES):
        yield data[begin : begin + _PIECE_BYTES]


class ReplicaReader:
    """Implements ObjectReader for a replicated step. Each rank's objects come from the member that holds them."""

    parallel_reads = 4

    def __init__(self, checkpoint: ReplicatedStep, token: str) -> None:
        self.prefix = prefix(checkpoint.generation, checkpoint.sequence)
        self._members: dict[str, ReplicaClient] = {}
        for holder in checkpoint.holders:
            member = ReplicaClient(holder.address, token)
            for rank in holder.ranks:
                self._members |= {data_key(self.prefix, rank): member, receipt_key(self.prefix, rank): member}
                if rank == 0:
                    self._members[state_key(self.prefix)] = member

    def get(self, key: str) -> tuple[bytes, str]:
        return self._member(key).get(key), ""

    def read_into(self, key: str, offset: int, memory: memoryview) -> int:
        return self._member(key).read_into(key, offset, memory)

    def _member(self, key: str) -> ReplicaClient:
        if key not in self._members:
            raise ObjectNotFound(key)
        return self._members[key]
