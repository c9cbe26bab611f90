"""The chart's helpers that compare labels, rendered alone.

In the chart they read what a cluster holds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spottrain_local.install import chart_folder, find_helm


def included(folder: Path, helper: str, values: dict[str, Any]) -> str:
    """What a helper gives for these values."""
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: helpers, version: 0.1.0}")
    for file in (chart_folder() / "templates").glob("_*.tpl"):
        (folder / "templates").mkdir(exist_ok=True)
        shutil.copy(file, folder / "templates")
    (folder / "templates" / "given.yaml").write_text(f'given: {{{{ include "{helper}" .Values | quote }}}}')
    command = [find_helm(), "template", "helpers", str(folder), "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.partition("given: ")[2].strip().strip('"')


@pytest.mark.parametrize(
    ("labels", "runs"),
    [({"spare": ""}, "true"), ({"spare": "no"}, ""), ({}, "")],
    ids=["has it", "other", "lacks it"],
)
def test_a_node_is_selected_by_a_label_without_a_value_if_it_has_it(
    labels: dict[str, str], runs: str, tmp_path: Path
) -> None:
    assert included(tmp_path, "spottrain.selects", {"labels": labels, "selector": {"spare": ""}}) == runs


@pytest.mark.parametrize(("theirs", "overlap"), [("", "true"), ("b", ""), (None, "true")], ids=str)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_releases_overlap_unless_they_want_different_values_of_a_label(
    theirs: str | None, overlap: str, swapped: bool, tmp_path: Path
) -> None:
    sides = [{"labels": {"fleet": ""}}, {"labels": {} if theirs is None else {"fleet": theirs}}]
    ours, others = reversed(sides) if swapped else sides
    assert included(tmp_path, "spottrain.overlap", {"ours": ours, "theirs": others}) == overlap
