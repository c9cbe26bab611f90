"""Exceptions that mean a lost peer, rather than a mistake on this rank."""

from __future__ import annotations

import re

# Torch's types for a broken backend or store are enough by themselves.
_ALONE = re.compile(r"^torch\.(distributed|_C)\.\w*(DistBackendError|DistNetworkError)$")
# Others are recognised by the messages of gloo, NCCL and the store. Not OSError: a script's own network errors also
# say "Connection reset by peer". Errors of gloo start with the path of its source: the connections'.
_TYPES = re.compile(r"^(builtins\.RuntimeError|torch\.(distributed|_C)\..*)$")
_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused) by|connection (closed|reset)|broken pipe|gloo"
    r"|nccl.*(abort|remote|unhandled|error|timeout|timed out)|socket (timeout|error)|failed to (recv|send)"
    r"|store->get|wait timeout|monitoredbarrier|peer (is )?(gone|closed)|rendezvousclosed",
    re.IGNORECASE,
)

# What NCCL says of this rank's own node, device or settings, in an error of the same type.
_OWN = re.compile(
    r"out of memory|duplicate gpu|invalid usage|invalid argument|uncorrectable|insufficient|no such device"
    r"|cuda-capable device|driver",
    re.IGNORECASE,
)

_OF_GLOO = re.compile(r"\[[^]]*gloo[^]]*\] (.+?)(?:\. This is typically .*)?$", re.DOTALL)


def is_lost_peer(exception: str, message: str) -> bool:
    """Whether an exception means a lost peer.

    `exception` is its type with its module, and `message` its text.
    """
    if _OWN.search(message):
        return False
    if _ALONE.match(exception):
        return True
    return bool(_TYPES.match(exception) and _TEXTS.search(message))


def lost_peer_sentence(message: str) -> str:
    """What such an exception's `message` says, in short.

    gloo adds the place in its source, and general advice.
    """
    said = _OF_GLOO.search(message)
    return f"The rank lost another rank ({said[1] if said else message.removesuffix('.')})"
