"""What the source of the user's program says before it runs."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from spottrain_api.settings.entrypoint import Entrypoint

_LIBRARY = "spottrain"


def opens_session(entrypoint: Entrypoint) -> bool:
    """Whether the program is going to open a session of the library.

    It does if it imports the library, and names its `session`. A program whose own modules do that isn't recognised.
    A program that can't be read or parsed fails by itself when it runs.
    """
    path = _source(entrypoint)
    try:
        return path is not None and names_session(path.read_bytes())
    except OSError:
        return False


def names_session(source: bytes) -> bool:
    """Whether a source uses the library's `session`.

    It imports `spottrain` and uses `spottrain.session`, or imports `session` from there.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    libraries = {
        alias.asname or _LIBRARY
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if _is_of_library(alias.name)
    }
    return any(_is_session(node, libraries) for node in nodes)


def _is_session(node: ast.AST, libraries: set[str]) -> bool:
    """Whether a node is an import of `session`, or `session` of one of the names of the library."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr="session"):
            return name in libraries
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            return _is_of_library(module) and any(alias.name == "session" for alias in aliases)
    return False


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] == _LIBRARY


def _source(entrypoint: Entrypoint) -> Path | None:
    """The program's file. Modules are found without an import of their packages, which is left to the program."""
    base = Path(entrypoint.working_dir or ".")
    if entrypoint.module is None:
        return base / (entrypoint.script or "")
    name = entrypoint.module.replace(".", "/")
    folders = [base, *(Path(folder) for folder in sys.path[1:])]
    files = (file for folder in folders for file in (folder / name / "__main__.py", folder / f"{name}.py"))
    return next((file for file in files if file.is_file()), None)
