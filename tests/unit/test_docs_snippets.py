"""Snippets in the docs are valid.

Jobs pass the models, Python parses, and tables match the code.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.reference_pages import meanings

from spottrain.data.audit import AuditHeader, AuditRecord, AuditWriter
from spottrain.data.order import Permutation
from spottrain_api.contract.names import KIND
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_local.address import MAX_NODES
from spottrain_local.spec import DEFAULT_SPEC, load_spec

ROOT = Path(__file__).parents[2]
NODE_POOLS = ROOT / "docs" / "reference" / "local-nodes.md"
OF_CHART = (ROOT / "docs" / "how-to" / "many-jobs.md",)
OF_OTHERS = (NODE_POOLS, *OF_CHART, ROOT / "docs" / "how-to" / "monitor.md")  # YAML, but not of jobs
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block of a page, and where it begins."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    folders = (ROOT / "docs", ROOT / "examples")
    return [ROOT / "README.md", *sorted(page for folder in folders for page in folder.rglob("*.md"))]


def snippets(*languages: str) -> Iterator[Snippet]:
    for page in pages():
        content = page.read_text()
        for block in BLOCK.finditer(content):
            if block["language"] in languages:
                line = content.count("\n", 0, block.start()) + 1
                yield Snippet(page, line, block["language"], textwrap.dedent(block["text"]))


def jobs() -> list[Snippet]:
    return [snippet for snippet in snippets("yaml") if f"kind: {KIND}" in snippet.text]


def parts_of_jobs() -> list[Snippet]:
    return [each for each in snippets("yaml") if "kind: " not in each.text and each.path not in OF_OTHERS]


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_a_job_in_the_docs_is_a_valid_one(job: Snippet) -> None:
    documents: list[dict[str, Any]] = [each for each in yaml.safe_load_all(job.text) if each["kind"] == KIND]
    assert documents
    for document in documents:
        assert document["apiVersion"] == "spottrain.dev/v1alpha1"
        assert document["metadata"]["name"]
        TrainingJobSpec.model_validate(document["spec"])


@pytest.mark.parametrize("values", [each for each in snippets("yaml") if each.path in OF_CHART], ids=str)
def test_values_in_the_docs_are_the_charts(values: Snippet) -> None:
    import jsonschema  # here, as it takes a second to import

    schema = json.loads((ROOT / "charts" / "spottrain" / "values.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(values.text), schema)


@pytest.mark.parametrize("snippet", parts_of_jobs(), ids=str)
def test_a_part_of_a_job_in_the_docs_has_fields_that_jobs_have(snippet: Snippet) -> None:
    part = yaml.safe_load(snippet.text)
    needed = {"image": "trainer", "entrypoint": {"script": "train.py"}, "nodes": {"max": 1}, "batch": {"global": 1}}
    TrainingJobSpec.model_validate(needed | {"checkpoint": {"uri": "s3://bucket/run"}} | part)


def test_node_pools_in_the_docs_are_valid_and_show_the_default(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    shown = []
    for snippet in snippets("yaml"):
        if snippet.path == NODE_POOLS:
            file.write_text(snippet.text)
            shown.append(load_spec(file))
    assert DEFAULT_SPEC in shown
    assert f"at most {MAX_NODES} nodes" in NODE_POOLS.read_text()


@pytest.mark.parametrize("snippet", list(snippets("python")), ids=str)
def test_python_in_the_docs_parses(snippet: Snippet) -> None:
    ast.parse(snippet.text)


def test_the_comparison_of_a_resized_run_reads_its_audit_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [snippet] = [each for each in snippets("python") if "read_audit" in each.text]
    order, header = (
        Permutation(num_samples=6, seed=1),
        AuditHeader(seed=1, shuffle=True, num_samples=6, global_batch=2),
    )

    def step(number: int, generation: int, world: int) -> None:
        for rank in range(world):
            positions = range(2 * number - 2, 2 * number)[rank::world]
            samples = tuple(order.samples(positions).tolist())
            made: dict[str, Any] = {"at": 0.0, "generation": generation, "step": number, "rank": rank, "world": world}
            writer = AuditWriter(tmp_path, header, generation=generation, rank=rank)
            writer.write(AuditRecord(positions=tuple(positions), samples=samples, **made))

    def printed() -> list[str]:
        exec(compile(snippet.text, "snippet.py", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(sys, "argv", ["snippet.py", str(tmp_path)])
    step(1, generation=1, world=1)
    step(2, generation=2, world=2)
    assert printed() == ["2 steps at world sizes [1, 2], 0 redone", "All samples are those of an undisturbed run."]
    step(4, generation=2, world=2)
    assert printed()[1:] == ["1 steps were completed by no generation, the first of them step 3"]


def test_troubleshooting_names_every_phase_condition_event_and_reason() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    known = {*meanings.PHASES, *meanings.CONDITIONS, *meanings.EVENTS, *meanings.CAUSES, *meanings.FAILURES}
    known |= {reason for condition in meanings.CONDITIONS.values() for reason in condition.reasons}
    missing = sorted(name for name in known if f"`{name}`" not in page)
    assert not missing, f"docs/troubleshooting.md lacks {missing}: add a row to the table that they belong to"
