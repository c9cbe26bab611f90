"""Log lines of all parts: text for people, or JSON.

The JSON says which job, generation and member a line is about.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from enum import StrEnum
from types import MappingProxyType

from pythonjsonlogger.json import JsonFormatter

ENV_LOG_FORMAT = "SPOTTRAIN_LOG_FORMAT"


class LogFormat(StrEnum):
    """Form of the log lines."""

    TEXT = "text"
    JSON = "json"


# Fields of every line of this process, and of the lines of the present task.
_of_process: dict[str, object] = {}
_of_task: ContextVar[Mapping[str, object]] = ContextVar("fields of log lines", default=MappingProxyType({}))


def log_format(environ: Mapping[str, str] = os.environ) -> LogFormat:
    """Read the format from SPOTTRAIN_LOG_FORMAT. Default: text.

    Raises:
        ValueError: It has another value; the text is a sentence.
    """
    given = environ.get(ENV_LOG_FORMAT) or LogFormat.TEXT
    try:
        return LogFormat(given.lower())
    except ValueError:
        raise ValueError(f"{ENV_LOG_FORMAT} is {given!r}. Set it to text or json.") from None


def configure(program: str, *, level: str = "INFO") -> None:
    """Write the log of this process to stderr.

    Raises:
        ValueError: The format or the level is unknown; the text is a sentence.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"The log level is {level!r}. Use DEBUG, INFO, WARNING or ERROR.")
    logging.basicConfig(level=level.upper(), handlers=[_handler(program, log_format())], force=True)


def configure_library(name: str) -> None:
    """Write the lines of the logger `name` as JSON, if that is the format.

    A script's own logging stays as it is.

    Raises:
        ValueError: The format is unknown; the text is a sentence.
    """
    logger = logging.getLogger(name)
    if log_format() is LogFormat.JSON and not logger.handlers:
        logger.addHandler(_handler(name, LogFormat.JSON))
        logger.setLevel(logging.INFO)
        logger.propagate = False


def remember(**fields: object) -> None:
    """Add fields to every later line of this process, such as its member; None removes a field."""
    _of_process.update(fields)
    for name in [name for name, value in _of_process.items() if value is None]:
        del _of_process[name]


@contextlib.contextmanager
def about(**fields: object) -> Iterator[None]:
    """Add fields to the log lines of the present task inside the block.

    An example is the job that the lines are about.
    """
    token = _of_task.set({**_of_task.get(), **fields})
    try:
        yield
    finally:
        _of_task.reset(token)


def say(logger: logging.Logger, sentence: str) -> None:
    """Show a sentence of the library to the user.

    It appears whatever the script's own logging shows.
    """
    if os.environ.get(ENV_LOG_FORMAT, "").lower() == LogFormat.JSON:
        configure_library(logger.name.partition(".")[0])
        logger.info("%s", sentence)
    else:
        print(f"spottrain: {sentence}", file=sys.stderr, flush=True)


def _handler(program: str, chosen: LogFormat) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    if chosen is LogFormat.TEXT:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {program} %(levelname)s %(message)s"))
        return handler
    handler.addFilter(_add_fields)
    handler.setFormatter(
        JsonFormatter(
            "%(levelname)s %(name)s %(message)s",
            rename_fields={"levelname": "level", "name": "logger"},
            static_fields={"program": program},
            timestamp=True,
        )
    )
    return handler


def _add_fields(record: logging.LogRecord) -> bool:
    for name, value in {**_of_process, **_of_task.get()}.items():
        setattr(record, name, value)
    return True
