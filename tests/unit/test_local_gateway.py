"""Names of Services as answers to DNS queries."""

import socket
import struct

import pytest

from spottrain_local.gateway import answer, parse_hosts

NAMES = {"a.team.svc.cluster.local": ["10.16.1.2", "10.16.2.2"]}


def query(name: str, kind: int = 1, flags: int = 0x0100, questions: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, flags, questions, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


def read(reply: bytes | None, asked: bytes) -> tuple[int, list[str]]:
    """The response code, and the addresses."""
    assert reply is not None
    number, flags, questions, answers, *_ = struct.unpack_from("!6H", reply)
    assert (number, questions, flags & 0x8000) == (7, 1, 0x8000)
    assert reply[12 : len(asked)] == asked[12:]
    records = [reply[len(asked) + 16 * i :][:16] for i in range(answers)]
    assert len(reply) == len(asked) + 16 * answers
    return flags & 0xF, [socket.inet_ntoa(record[12:]) for record in records]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("a.team.svc.cluster.local", 1, (0, ["10.16.1.2", "10.16.2.2"])),
        ("A.Team.svc.cluster.LOCAL", 1, (0, ["10.16.1.2", "10.16.2.2"])),
        ("a.team.svc.cluster.local", 28, (0, [])),
        ("b.team.svc.cluster.local", 1, (3, [])),
    ],
    ids=["known", "in other letters", "no IPv6 address", "unknown"],
)
def test_queries_are_answered(name: str, kind: int, expected: tuple[int, list[str]]) -> None:
    asked = query(name, kind)
    assert read(answer(asked, NAMES), asked) == expected


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 12, query("a")[:-3], query("a", flags=0x8000), query("a", questions=2), b"\xff" * 40],
    ids=["nothing", "no name", "cut off", "an answer", "two questions", "noise"],
)
def test_other_packets_are_ignored(data: bytes) -> None:
    assert answer(data, NAMES) is None


def test_the_addresses_of_a_hosts_file() -> None:
    text = "127.0.0.1 localhost\n10.16.1.2 a.team a.team.svc\n10.16.2.2 a.team\n"
    assert parse_hosts(text) == {
        "localhost": ["127.0.0.1"],
        "a.team": ["10.16.1.2", "10.16.2.2"],
        "a.team.svc": ["10.16.1.2"],
    }
