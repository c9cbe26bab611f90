"""The reference pages name everything that they are about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from docs.reference_pages import GENERATORS, MARKER, chart, environment, point_to_repository
from docs.reference_pages.meanings import CAUSES, CONDITIONS, EVENTS, FAILURES, PHASES, WAITING
from docs.reference_pages.trainingjob import anchor

import spottrain
from spottrain_api.contract import names, nodes
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EndReason, EventReason, WaitingReason
from spottrain_api.contract.nodes import TAINTS
from spottrain_api.contract.reports import FailureReason
from spottrain_api.v1alpha1.status import Phase
from spottrain_cli.main import main
from spottrain_local.spec import NodePool, TaintSpec
from spottrain_operator.metrics import Metrics
from spottrain_watcher.metrics import Metrics as WatcherMetrics

CHECKOUT = Path(__file__).parents[2]
PAGES = CHECKOUT / "docs" / "reference"
FOLDERS = ("runtime", "api", "planner", "operator", "cli", "trainer-image", "local-cluster")
PACKAGES = [CHECKOUT / each for each in FOLDERS]
OPERATOR = CHECKOUT / "operator" / "spottrain_operator"
ENUMS = {each.value for kind in (Cause, FailureReason, Phase) for each in kind}
NAMES: dict[str, type[StrEnum]] = {
    kind.__name__: kind for kind in (Cause, ConditionReason, ConditionType, EndReason, EventReason)
}
# Of other programs, and set by the project for them alone.
NOT_OURS = {"PATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "DS_ACCELERATOR", "LOCAL_SIZE"}


def test_every_marker_has_text_and_every_text_a_page() -> None:
    markers = [marker for page in PAGES.glob("*.md") for marker in MARKER.findall(page.read_text())]
    assert sorted(markers) == sorted(GENERATORS)


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_of_the_crd(part: str) -> None:
    crd = yaml.safe_load((CHECKOUT / "crds" / "trainingjobs.spottrain.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part]
    page = GENERATORS[part]()
    paths = list(field_paths(part, schema))
    assert len(paths) > 100
    missing = [path for path in paths if f"({anchor(path)})=\n`{path.rsplit('.', 1)[1]}`" not in page]
    assert missing == []


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_rule_of_the_crd(part: str) -> None:
    crd = yaml.safe_load((CHECKOUT / "crds" / "trainingjobs.spottrain.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part]
    page = GENERATORS[part]()
    assert [message for message in messages(schema) if message not in page] == []


def test_every_field_of_a_node_pool() -> None:
    page = GENERATORS["pools"]()
    for path, model in (("nodes", NodePool), ("nodes.taints", TaintSpec)):
        for name, each in model.model_fields.items():
            entry = page.partition("(" + anchor(f"{path}.{each.alias or name}") + ")=\n")[2]
            assert each.description, name
            assert " ".join(each.description.split()) in " ".join(entry.split("\n\n")[0].split()), name


def field_paths(path: str, schema: dict[str, Any]) -> Iterator[str]:
    for name, each in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from field_paths(f"{path}.{name}", each.get("items", each))


def messages(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for each in schema.get("properties", {}).values():
        yield from messages(each.get("items") or each.get("additionalProperties") or each)


def test_every_metric() -> None:
    body, _ = Metrics(num_agents=lambda: 0).exposition()
    names = set(re.findall(r"^# TYPE (spottrain_\w+)", body.decode(), re.MULTILINE))
    assert len(names) > 20
    page = GENERATORS["metrics"]()
    assert [name for name in names if f"`{name}`" not in page] == []
    body, _ = WatcherMetrics(()).exposition()
    names = set(re.findall(r"^# TYPE (spottrain_\w+)", body.decode(), re.MULTILINE))
    assert len(names) == 4
    assert [name for name in names if f"`{name}`" not in GENERATORS["watchermetrics"]()] == []


def test_every_environment_variable_that_the_sources_name() -> None:
    named = {name for tree in trees(*PACKAGES) for name in environment_variables(tree)} - NOT_OURS
    assert named - environment.described() == set()
    assert environment.described() - named - set(re.findall(r"[A-Z_]{4,}", sources())) == set()


def environment_variables(tree: ast.Module) -> Iterator[str]:
    """The names of environment variables in a module.

    They are constants named ENV_…, options' envvar, and literals that `environ` is asked for.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))) if "ENV_" in name:
                yield text
            case ast.keyword(arg="envvar", value=ast.Constant(value=str(text))):
                yield text
            case ast.Subscript(value=value, slice=ast.Constant(value=str(text))) if is_environment(value):
                yield text
            case ast.Call(func=ast.Attribute(value=value), args=[ast.Constant(value=str(text)), *_]) if (
                is_environment(value)
            ):
                yield text


def is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).rsplit(".", 1)[-1] == "environ"


def test_every_label_annotation_and_taint() -> None:
    page = GENERATORS["names"]()
    assert [taint for taint in TAINTS if f"`{taint}`" not in GENERATORS["taints"]()] == []
    constants = vars(names) | vars(nodes)
    found = {name: value for name, value in constants.items() if name.startswith(("LABEL_", "ANNOTATION_", "TAINT_"))}
    assert len(found) > 6
    assert [name for name, value in found.items() if f"`{value}`" not in page] == []


def test_every_member_of_the_enumerations_has_a_meaning() -> None:
    assert set(PHASES) == {each.value for each in Phase}
    assert set(CAUSES) == {each.value for each in Cause}
    assert set(FAILURES) == set(FailureReason)
    assert set(WAITING) == set(WaitingReason)
    assert set(CONDITIONS) == set(ConditionType)
    assert set(EventReason) | set(EndReason) <= set(EVENTS)
    assert set(ConditionReason) <= {reason for each in CONDITIONS.values() for reason in each.reasons}


def test_every_event_of_the_operator_has_a_meaning() -> None:
    told = {reason for tree in trees(OPERATOR) for reason in events(tree)} | set(WaitingReason)
    assert {"PodsCreated", "NoProgress", "CheckpointURIInUse", "PodNotCreated"} <= told
    assert told - set(EVENTS) - ENUMS == set()
    assert set(EVENTS) - told - ENUMS == set()


def test_every_condition_of_the_operator_has_a_meaning() -> None:
    written = {pair for tree in trees(OPERATOR) for pair in conditions(tree)}
    assert {("SpotAvailable", "FellBack"), ("Blocked", "Free"), ("PodsHealthy", "PodsRefused")} <= written
    assert {kind for kind, _ in written} | {"Failed", "Succeeded"} == set(CONDITIONS)
    assert [
        (kind, reason) for kind, reason in written if reason and reason not in CONDITIONS[ConditionType(kind)].reasons
    ] == []


def test_every_end_of_a_job_has_a_meaning() -> None:
    ends = {reason for tree in trees(OPERATOR) for reason in called_with(tree, "finish", 3)}
    assert {"NoProgress", "CannotStart", "Succeeded"} <= ends
    assert (
        ends - set(CONDITIONS[ConditionType.FAILED].reasons) - set(CONDITIONS[ConditionType.SUCCEEDED].reasons)
        == set()
    )


def events(tree: ast.Module) -> Iterator[str]:
    yield from called_with(tree, "record", 0)
    yield from called_with(tree, "finish", 3)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and function_name(node) == "Event":
            yield from texts(tree, *(each.value for each in node.keywords if each.arg == "reason"))


def conditions(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Type and reason of each condition that is written.

    The reason is None if it isn't a text there.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if function_name(node) == "condition" and len(node.args) > 2:
            kinds, reasons = texts(tree, node.args[0]), texts(tree, node.args[2])
        elif function_name(node) == "Condition":
            fields = {each.arg: each.value for each in node.keywords}
            kinds, reasons = texts(tree, fields["type"]), texts(tree, fields["reason"])
        else:
            continue
        yield from ((kind, reason) for kind in kinds for reason in (reasons or (None,)))


def called_with(tree: ast.Module, function: str, position: int) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and function_name(node) == function and len(node.args) > position:
            yield from texts(tree, node.args[position])


def function_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rsplit(".", 1)[-1]


def texts(tree: ast.Module, *values: ast.expr) -> list[str]:
    """Return what an expression may be.

    That is a member of an enumeration, or the first item that a function returns. A variable may be that of any
    function that returns a reason and a message.
    """
    found: list[str] = []
    for value in values:
        match value:
            case ast.Attribute(value=ast.Name(id=kind), attr=member) if kind in NAMES:
                found.append(NAMES[kind][member].value)
            case ast.Attribute(value=value, attr="value"):
                found += texts(tree, value)
            case ast.Name():
                found += [text for each in functions_of_pairs(tree) for text in returned(tree, each)]
            case ast.Starred(value=ast.Call() as call):
                found += returned(tree, function_name(call))
    return found


def functions_of_pairs(tree: ast.Module) -> list[str]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.returns is not None]
    return [node.name for node in functions if "tuple[StrEnum, str]" in ast.unparse(node.returns or ast.Constant(""))]


def returned(tree: ast.Module, function: str) -> list[str]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    returns = [node.value for each in functions for node in ast.walk(each) if isinstance(node, ast.Return)]
    return [text for value in returns if isinstance(value, ast.Tuple) for text in texts(tree, value.elts[0])]


def test_every_value_of_the_chart() -> None:
    described = {each.path for each in chart.entries(chart.FILE.read_text())}
    assert [path for path in leaves("", yaml.safe_load(chart.FILE.read_text())) if not covers(described, path)] == []


def test_a_value_of_the_chart_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"operator\.port has no comment"):
        list(chart.entries("operator:\n  port: 1\n"))


def leaves(path: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(f"{path}.{key}".removeprefix("."), each)
    else:
        yield path


def covers(described: set[str], path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in described)


def test_every_command_and_option_says_what_it_is_for() -> None:
    bare = list(undescribed("spottrain", main))
    assert bare == []


def undescribed(path: str, command: click.Command) -> Iterator[str]:
    if not command.help:
        yield path
    for option in command.params:
        if isinstance(option, click.Option) and not option.help:
            yield f"{path} {option.opts[0]}"
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from undescribed(f"{path} {name}", each)


def test_every_public_name_of_the_library() -> None:
    page = (PAGES / "python.md").read_text()
    assert [name for name in spottrain.__all__ if f":: spottrain.{name}" not in page] == []


def test_links_out_of_the_docs_lead_to_files() -> None:
    page = PAGES / "chart.md"
    text, lost = point_to_repository("[a](../../README.md#x), [b](../metrics.md) and [c](../../nowhere.md)", page)
    assert text.startswith("[a](https://github.com/spottrain/spottrain/blob/main/README.md#x), [b](../metrics.md)")
    assert lost == ["../../nowhere.md"]


def trees(*folders: Path) -> Iterator[ast.Module]:
    return (ast.parse(path.read_text()) for folder in folders for path in sorted(folder.rglob("*.py")))


def sources() -> str:
    return "".join(path.read_text() for folder in PACKAGES for path in sorted(folder.rglob("*.py")))
