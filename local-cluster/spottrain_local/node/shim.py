"""The small process between the node process and one container's processes.

It runs as a script (`python -I -S shim.py SPEC PARENT_PID`) and imports nothing of the project. It starts the
container's command in a session of its own and records its output as CRI log lines (`TIME stdout F TEXT`). It ends
only when *every* descendant is gone, also those in sessions of their own: it is their subreaper, so that orphans
become its children. When the command exits, all others are killed, as when a container's PID 1 exits.

SPEC is a JSON file: `argv`, `env`, `cwd`, `log` (path), `exit` (path of the exit record), `logMaxBytes`,
`lingerSeconds`, which the others have to end by themselves after the command, and `stdin`: `null` (the default),
`pipe` or `terminal`, or `inherit` for the shim's own.
On standard output the node process reads one JSON object a line: `{"started": PID}` or `{"failed": SENTENCE}`,
then the exit record `{"exitCode", "signal", "startedAt", "finishedAt"}`.

SIGTERM is passed on to the command. SIGUSR1 kills everything at once, and is also what the kernel sends when
the node process dies (PR_SET_PDEATHSIG), so that a killed node leaves nothing behind.

If SPEC has `attach`, the shim listens on a Unix socket of that name beside the exit record (see `AttachServer`).
"""

import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from typing import Any, NoReturn

KILL_ALL = signal.SIGUSR1
MAX_LINE_BYTES = 16384
READ_BYTES = 65536
# What a pipe holds at most, if a command without privileges enlarges it.
PIPE_BYTES = 2**20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A client that does not take the output in this time loses the connection. It must not hold up the container.
ATTACH_SEND_SECONDS = 1.0


def set_parent_death_signal(number: int) -> None:
    """Let the kernel send this process a signal when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, instead of init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def timestamp() -> str:
    """Return the current time as RFC 3339 with nanoseconds, in UTC."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{nanoseconds:09d}Z"


def _parents() -> dict[int, int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The name stands in parentheses, and may itself contain spaces and parentheses.
                    parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # It has just ended.
    return parents


def descendants(root: int, *, spare: frozenset[int] = frozenset()) -> list[int]:
    """List every process below `root`, without the subtrees of `spare`."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(), []) if pid not in spare]
        found += below
        queue += below
    return found


def kill_each(pids: list[int]) -> None:
    """Send SIGKILL to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


class LogFile:
    """Appends CRI log lines to a file.

    When the file grows past `max_bytes`, it is moved to `PATH.1`.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._rest = b""
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Take output from the pipe: write whole lines, and keep the rest for later."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        stamp = timestamp().encode()
        for line in lines:
            self._write_line(stamp, line)
        while len(self._rest) >= MAX_LINE_BYTES:
            self._append(stamp + b" stdout P " + self._rest[:MAX_LINE_BYTES] + b"\n")
            self._rest = self._rest[MAX_LINE_BYTES:]

    def _write_line(self, stamp: bytes, line: bytes) -> None:
        while len(line) > MAX_LINE_BYTES:
            self._append(stamp + b" stdout P " + line[:MAX_LINE_BYTES] + b"\n")
            line = line[MAX_LINE_BYTES:]
        self._append(stamp + b" stdout F " + line + b"\n")

    def _append(self, record: bytes) -> None:
        try:
            if self._size + len(record) > self._max_bytes:
                self._move_aside()
            written = os.write(self._fd, record)
            if written < len(record):
                os.ftruncate(self._fd, self._size)  # half a record would spoil the next one
            else:
                self._size += written
        except OSError:
            return  # A full disk loses output. It must not end the container.

    def _move_aside(self) -> None:
        former = self._fd
        if os.path.exists(self._path):  # An earlier try may have moved it, without room for a new one.
            os.rename(self._path, self._path + ".1")
        self._open()
        os.close(former)

    def finish(self) -> None:
        """Write an unfinished last line."""
        if self._rest:
            self._write_line(timestamp().encode(), self._rest)
            self._rest = b""


class AttachServer:
    """Gives clients the output of a container, and its input.

    A client first sends one byte: `i` if it has input, `o` if not. It gets one byte, and with it the descriptor of
    the container's input or terminal, if there is one. It writes into that itself. Then it gets all output. A client
    without more input shuts its side down: if `once` is set, the container has no more input either.
    """

    def __init__(self, name: str, source: int | None, *, once: bool) -> None:
        self._input = source
        self._once = once
        self._greeting: set[socket.socket] = set()
        self._with_input: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        if os.path.exists(name):
            os.unlink(name)  # An earlier node process has left it.
        self._listener.bind(name)
        self._listener.listen()

    def sources(self) -> list[socket.socket]:
        """Return the sockets to wait for."""
        return [self._listener, *self._greeting, *self._with_input]

    def serve(self, ready: list[Any]) -> None:
        """Serve the sockets that are ready."""
        if self._listener in ready:
            client, _ = self._listener.accept()
            client.settimeout(ATTACH_SEND_SECONDS)
            self._greeting.add(client)
        for client in self._greeting.intersection(ready):
            self._greet(client)
        for client in self._with_input.intersection(ready):
            self._with_input.discard(client)
            self._end_input()

    def _greet(self, client: socket.socket) -> None:
        self._greeting.discard(client)
        try:
            wish = client.recv(1)
            if self._input is None:
                client.sendall(b"\0")
            else:
                socket.send_fds(client, [b"\0"], [self._input])
        except OSError:
            client.close()
            return
        self._clients.add(client)
        if wish == b"i":
            self._with_input.add(client)

    def _end_input(self) -> None:
        if self._once and self._input is not None and not os.isatty(self._input):
            os.close(self._input)
            self._input = None

    def send(self, data: bytes) -> None:
        """Send output to all clients."""
        for client in list(self._clients):
            try:
                client.sendall(data)
            except OSError:
                self._clients.discard(client)
                self._with_input.discard(client)
                client.close()


def _exec(spec: dict[str, Any], source: int, output: int, errors: int, shim: int) -> NoReturn:
    """Become the command, in the child.

    `errors`, which exec closes, reports a failure.
    """
    try:
        os.setsid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(1)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        os.dup2(source, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if spec.get("stdin") == "terminal":
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(spec["cwd"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        os.write(errors, _start_failure(spec, error).encode())
    except ValueError as error:  # a NUL byte in an argument or a variable
        os.write(errors, f"The command {spec['argv'][0]!r} cannot be started: {error}.".encode())
    os._exit(128)


def _start_failure(spec: dict[str, Any], error: OSError) -> str:
    command = spec["argv"][0]
    if error.filename == spec["cwd"] and not os.path.isdir(spec["cwd"]):
        return f"The working directory {spec['cwd']!r} does not exist."
    if isinstance(error, FileNotFoundError):
        where = "does not exist" if "/" in command else "was not found on the PATH " + spec["env"].get("PATH", "")
        return f"The command {command!r} {where}."
    return f"The command {command!r} cannot be started: {error.strerror}."


class Shim:
    """Runs one command to its end."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._log = LogFile(spec["log"], spec["logMaxBytes"])
        self._output: int | None = None
        self._attached: AttachServer | None = None
        self._status: int | None = None
        self._kill_at = float("inf")
        self.main_pid = 0
        self._started_at = timestamp()

    def start(self) -> str | None:
        """Start the command. Return a sentence if that is impossible."""
        given, source, output = self._open_streams()
        errors_read, errors = os.pipe()
        shim = os.getpid()
        self.main_pid = os.fork()
        if self.main_pid == 0:
            _exec(self._spec, source, output, errors, shim)
        for descriptor in {source, output, errors} - {0}:
            os.close(descriptor)
        if "attach" in self._spec:
            os.chdir(os.path.dirname(self._spec["exit"]))  # The address of a Unix socket must be short.
            self._attached = AttachServer(self._spec["attach"], given, once=self._spec["stdinOnce"])
        with os.fdopen(errors_read, "rb") as file:
            failure = file.read().decode()
        return failure or None

    def _open_streams(self) -> tuple[int | None, int, int]:
        """Open the command's input and output.

        Returns the end of its input that stays here, and what the command has as input and output.
        """
        kind = self._spec.get("stdin", "null")
        if kind == "terminal":
            terminal, its_side = os.openpty()
            self._output = os.dup(terminal)
            os.set_blocking(self._output, False)
            return terminal, its_side, its_side
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        if kind == "pipe":
            source, given = os.pipe()
            return given, source, output
        if kind == "inherit":
            return None, 0, output
        return None, os.open(os.devnull, os.O_RDONLY), output

    @property
    def _ending(self) -> bool:
        return self._kill_at < float("inf")

    def run(self, wakeup: int) -> dict[str, Any]:
        """Serve signals and output until nothing of the container is left.

        Returns the exit record.
        """
        delay = 0.005
        while True:
            sources: list[Any] = [wakeup] if self._output is None else [wakeup, self._output]
            attached = self._attached.sources() if self._attached else []
            ready, _, _ = select.select([*sources, *attached], [], [], delay if self._ending else None)
            if self._attached:
                self._attached.serve(ready)
            self._copy_output(READ_BYTES)
            self._take_signals(wakeup)
            self._reap()
            if self._ending:
                left = descendants(os.getpid())
                if not left:
                    break
                if time.monotonic() >= self._kill_at:
                    kill_each(left)
                delay = min(delay * 2, 0.5)
        self._copy_output(PIPE_BYTES)
        self._log.finish()
        return self._exit_record()

    def _copy_output(self, limit: int) -> None:
        """Record the output that is there, and stop at about `limit` bytes.

        A command may fill the pipe as fast as it is read.
        """
        if self._output is None:
            return
        try:
            while data := os.read(self._output, READ_BYTES):
                self._log.write(data)
                if self._attached:
                    self._attached.send(data)
                limit -= len(data)
                if limit <= 0:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # Nobody has the other side of the terminal any more.
                raise
        os.close(self._output)
        self._output = None

    def _take_signals(self, wakeup: int) -> None:
        try:
            numbers = os.read(wakeup, 512)
        except BlockingIOError:
            return
        if KILL_ALL in numbers:
            self._kill_at = 0.0
        elif signal.SIGTERM in numbers and self._status is None:
            os.kill(self.main_pid, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main_pid:
                self._status = status
                linger = self._spec.get("lingerSeconds", 0.0)
                self._kill_at = min(self._kill_at, time.monotonic() + linger)

    def _exit_record(self) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(self._status) if self._status is not None else -signal.SIGKILL
        return {
            "exitCode": code if code >= 0 else 128 - code,
            "signal": max(0, -code),
            "startedAt": self._started_at,
            "finishedAt": timestamp(),
        }


def _tell(message: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        return  # The node process is gone. The exit record stays on the disk.


def _save(path: str, record: dict[str, Any]) -> None:
    try:
        with open(path + ".tmp", "w") as file:
            json.dump(record, file)
        os.replace(path + ".tmp", path)
    except OSError:
        return  # A full disk. The node process has the record.


def main(spec_path: str, parent: int) -> None:
    """Run the command of a spec file as the child of `parent`."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, KILL_ALL, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    set_parent_death_signal(KILL_ALL)
    if os.getppid() != parent:
        return  # The node process died before the line above.
    with open(spec_path) as file:
        spec = json.load(file)
    shim = Shim(spec)
    failure = shim.start()
    _tell({"failed": failure} if failure else {"started": shim.main_pid})
    record = shim.run(wakeup)
    if failure:
        record |= {"exitCode": 128, "signal": 0, "startError": failure}
    _tell(record)
    _save(spec["exit"], record)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
