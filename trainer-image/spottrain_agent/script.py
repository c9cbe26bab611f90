"""What the source of the user's program says before it runs."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from spottrain_api.contract import Entrypoint

_LIBRARY, _SESSION = "spottrain", "session"


def opens_session(entrypoint: Entrypoint) -> bool:
    """Whether the program is going to open a session of the library: it imports it, and names `session`.

    One whose own modules do so for it isn't recognised, and one that can't be read or parsed says so itself when it
    runs.
    """
    path = _source(entrypoint)
    try:
        return path is not None and names_session(path.read_bytes())
    except OSError:
        return False


def names_session(source: bytes) -> bool:
    """Whether a source imports `spottrain` and has `spottrain.session`, or imports `session` from there."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    imports_library = any(
        _is_of_library(alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names
    )
    imports_session = any(
        alias.name == _SESSION
        for node in nodes
        if isinstance(node, ast.ImportFrom) and _is_of_library(node.module or "")
        for alias in node.names
    )
    has_session = any(isinstance(node, ast.Attribute) and node.attr == _SESSION for node in nodes)
    return imports_session or (imports_library and has_session)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] == _LIBRARY


def _source(entrypoint: Entrypoint) -> Path | None:
    """The program's file. Modules are looked for without importing their packages, which is the program's own act."""
    base = Path(entrypoint.working_dir or ".")
    if entrypoint.module is None:
        return base / (entrypoint.script or "")
    name = entrypoint.module.replace(".", "/")
    folders = [base, *(Path(folder) for folder in sys.path[1:])]
    files = (file for folder in folders for file in (folder / name / "__main__.py", folder / f"{name}.py"))
    return next((file for file in files if file.is_file()), None)
