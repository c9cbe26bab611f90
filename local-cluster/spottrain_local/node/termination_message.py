"""A container's termination message.

The container's spec has its terminationMessagePath and terminationMessagePolicy.
"""

from spottrain_local.node.api import JSONObject
from spottrain_local.node.containers import ContainerRun, Terminated

MAX_BYTES = 4096
FALLBACK_BYTES = 2048
FALLBACK_LINES = 80


def termination_message(spec: JSONObject, run: ContainerRun, ended: Terminated) -> str:
    """Return the text of the container's termination file, or its last output.

    The policy says whether the last output may stand in.
    """
    try:
        text = (run.directory.parent / "termination").read_bytes()[:MAX_BYTES].decode(errors="replace")
    except OSError:
        text = ""
    wants_logs = spec.get("terminationMessagePolicy") == "FallbackToLogsOnError" and ended.exit_code != 0
    if text or not wants_logs or not run.log_path.exists():
        return text
    with run.log_path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4 * FALLBACK_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    output = "\n".join(line.split(" ", 3)[-1] for line in lines[-FALLBACK_LINES:])
    return output[-FALLBACK_BYTES:]
