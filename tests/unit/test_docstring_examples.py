"""Docstrings: first lines are short, examples run, and functions are described.

Public functions say what they take, return and raise.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spottrain
from forked_programs import run_forked
from spottrain import schedules
from spottrain.data.batch import BatchPlan
from spottrain.loop.foreign_loop import ForeignLoop
from spottrain.recovery.script_parts import Stateful

WITH_EXAMPLES: dict[str, Any] = {
    "session": spottrain.session,
    "Session": spottrain.Session,
    "StabilityConfig": spottrain.StabilityConfig,
    "warmup_cosine": schedules.warmup_cosine,
    "warmup_stable_decay": schedules.warmup_stable_decay,
    "BatchPlan": BatchPlan,
    "ForeignLoop": ForeignLoop,
    "ByRank": spottrain.ByRank,
    "Run": spottrain.Run,
    "Stateful": Stateful,
}
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    spottrain.session,
    spottrain.Session.prepare,
    spottrain.Session.adopt,
    spottrain.Session.attach,
    spottrain.Training.steps,
    spottrain.Step.backward,
    spottrain.Run.may_update,
    spottrain.Run.boundary,
    schedules.warmup_cosine,
    schedules.warmup_stable_decay,
    ForeignLoop.__init__,
    ForeignLoop.weigh,
    ForeignLoop.observe,
)

CHECKOUT = Path(__file__).parents[2]
FOLDERS = (
    *("runtime", "api", "planner", "operator", "cli", "trainer-image", "local-cluster"),
    *("tests", "examples", "benchmarks", "demo", "docs", "release"),
)


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def run_examples(name: str) -> bool:
    """Whether there are examples, and all of them end as they say."""
    runner = doctest.DocTestRunner()
    for each in doctest.DocTestFinder().find(WITH_EXAMPLES[name], name, module=False):
        runner.run(each)
    return runner.tries > 0 and runner.failures == 0


def test_every_example_runs(fork: Any) -> None:
    """In a process of its own: a session joins a world, and leaves it."""
    done = run_forked(fork, Path(__file__))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def definitions(statements: Iterable[ast.AST]) -> Iterator[Definition]:
    """All classes and functions among these statements and in them. Expressions, which hold none, are left out."""
    for statement in statements:
        if isinstance(statement, Definition):
            yield statement
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from definitions(getattr(statement, part, ()))


def first_lines(source: str) -> Iterator[tuple[str, str]]:
    """Name of each module, class and function with a docstring, and its first line."""
    module = ast.parse(source)
    for node in (module, *definitions(module.body)):
        text = ast.get_docstring(node)
        if text:
            yield getattr(node, "name", "module"), text.splitlines()[0]


def test_the_first_line_of_every_docstring_is_short() -> None:
    """Up to 110 characters, as tools show it alone."""
    files = [path for name in FOLDERS for path in sorted((CHECKOUT / name).rglob("*.py"))]
    lines = [(path, *found) for path in files for found in first_lines(path.read_text())]
    assert len(lines) > 1000
    long = [f"{path.relative_to(CHECKOUT)}, {name}: {line}" for path, name, line in lines if len(line) > 110]
    assert not long, "\n".join(["Above 110 characters:", *long])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_argument_is_described(function: Callable[..., Any]) -> None:
    described = re.findall(r"^ +(\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    arguments = [name for name in inspect.signature(function).parameters if name != "self"]
    assert [name for name in arguments if name not in described] == []


if __name__ == "__main__":
    bad = [name for name in WITH_EXAMPLES if not run_examples(name)]
    sys.exit(f"without an example that runs: {bad}" if bad else 0)
