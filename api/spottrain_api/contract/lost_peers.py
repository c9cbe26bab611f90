"""How an exception says that another rank went away, rather than that this one is wrong."""

from __future__ import annotations

import re

# torch's types for a broken backend or store say it by themselves.
_ALONE = re.compile(r"^torch\.(distributed|_C)\.\w*(DistBackendError|DistNetworkError)$")
# Others by what gloo, NCCL and the store write into them. Not OSError: a script's own network troubles say
# "Connection reset by peer" as well. What gloo raises begins with the path of its source: the connections'.
_TYPES = re.compile(r"^(builtins\.RuntimeError|torch\.(distributed|_C)\..*)$")
_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused) by|connection (closed|reset)|broken pipe|gloo"
    r"|nccl.*(abort|remote|unhandled|error|timeout|timed out)|socket (timeout|error)|failed to (recv|send)"
    r"|store->get|wait timeout|monitoredbarrier|peer (is )?(gone|closed)|rendezvousclosed",
    re.IGNORECASE,
)


def is_lost_peer(exception: str, message: str) -> bool:
    """Whether an exception of the type `exception` (with its module) and this message means a lost peer."""
    if _ALONE.match(exception):
        return True
    return bool(_TYPES.match(exception) and _TEXTS.search(message))
