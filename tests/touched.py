"""The test files that a change touches: `tests/touched.py [--since COMMIT]`.

A test file is touched if it changed itself, or if it uses a file that changed: it imports it, names it as a
script, or does so through other modules of tests. What product code imports in turn does not count: otherwise,
nearly every change would touch nearly every test. Tests that start a part as a process import nothing of it, so
AREAS names them. Unit tests are left out, since `make check` runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# Where modules lie: a module's name is its path below one of these.
SOURCES = ("api", "cli", "local-cluster", "operator", "planner", "runtime", "trainer-image", "tests", "")

# The tests of what is started as a process or rendered, by the folder that it comes from.
AREAS = {
    "charts": "integration/test_chart_*.py",
    "crds": "integration/test_crd_*.py",
    "local-cluster/controlplane": "integration/test_local_cluster.py",
    "local-cluster/spottrain_local/node": "integration/test_node_runtime.py",
    "operator/spottrain_operator": "integration/test_operator_process.py",
    "trainer-image/spottrain_agent": "integration/test_agent_generations.py",
}


def changed_files(since: str) -> set[Path]:
    """Files that differ from a commit, and files that git does not know yet."""
    differing = _git("diff", "--name-only", "--diff-filter=d", since)
    unknown = _git("ls-files", "--others", "--exclude-standard")
    return {ROOT / line for line in [*differing, *unknown]}


def touched_tests(changed: Iterable[Path]) -> list[Path]:
    """The test files, without unit tests, that use one of these files."""
    changed = set(changed)
    of_areas = {
        test
        for folder, pattern in AREAS.items()
        if any(path.is_relative_to(ROOT / folder) for path in changed)
        for test in TESTS.glob(pattern)
    }
    tests = [path for path in sorted(TESTS.rglob("test_*.py")) if path.parent.name != "unit"]
    return [path for path in tests if path in of_areas or _closure(path) & changed]


def _closure(path: Path) -> set[Path]:
    """A test file, with what it uses directly or through other files of tests."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.is_relative_to(TESTS):
            todo += _used_by(current)
    return seen


@cache
def _used_by(path: Path) -> frozenset[Path]:
    found: set[Path] = set()
    named = {"integration", "tests"}  # a script beside a test is named without its folder
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {file for alias in node.names for file in _files_of(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(_files_of(node.module))
            found |= {file for alias in node.names for file in _files_of(f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.update(Path(node.value).parts)
    return frozenset(found | {script for script in _scripts() if {script.name, script.parent.name} <= named})


@cache
def _scripts() -> tuple[Path, ...]:
    return tuple(path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py"))


def _files_of(module: str) -> Iterator[Path]:
    below = Path(*module.split("."))
    for source in SOURCES:
        for path in (ROOT / source / below.with_suffix(".py"), ROOT / source / below / "__init__.py"):
            if path.is_file():
                yield path


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()} Name a commit with --since.")
    return done.stdout.splitlines()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--since", default="origin/main", help="compare with where this commit and HEAD parted")
    since = _git("merge-base", parser.parse_args().since, "HEAD")[0]
    # On one line: a variable of make ends at the end of its line.
    sys.stdout.write(" ".join(str(path.relative_to(ROOT)) for path in touched_tests(changed_files(since))) + "\n")


if __name__ == "__main__":
    _main()
