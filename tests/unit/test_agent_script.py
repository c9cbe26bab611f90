"""What is known of a program before it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spottrain_agent.generation_run import missing_entrypoint
from spottrain_agent.script import names_session, opens_session
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.entrypoint import Entrypoint

SOURCES = [
    pytest.param("import spottrain\nwith spottrain.session(): pass", True, id="plain"),
    pytest.param("import spottrain as st\ndef main():\n    with st.session(): pass", True, id="by-another-name"),
    pytest.param("def main():\n    from spottrain import session as begin", True, id="from-inside-a-function"),
    pytest.param("from spottrain.loop.entry import session", True, id="from-its-module"),
    pytest.param("import torch\ntorch.distributed.init_process_group()", False, id="plain-torchrun"),
    pytest.param("import spottrain.data.order", False, id="a-part-of-the-library"),
    pytest.param("import spottrain_extra\nspottrain_extra.session()", False, id="another-library"),
    pytest.param("import aiohttp\nfrom spottrain import Step\naiohttp.session()", False, id="another-session"),
    pytest.param("import requests, spottrain.data.order\nrequests.session()", False, id="a-session-of-requests"),
    pytest.param("import spottrain\nclass A:\n    def f(self): self.session()", False, id="a-session-of-its-own"),
    pytest.param("import spottrain as st\nspottrain.session()", False, id="not-by-that-name"),
    pytest.param("import spottrain.data.order\nspottrain.session()", True, id="by-way-of-a-part"),
    pytest.param("from . import session", False, id="relative"),
    pytest.param("from .spottrain import session", False, id="relative-with-the-same-name"),
    pytest.param("# import spottrain; spottrain.session()", False, id="a-comment"),
    pytest.param("import spottrain\nwith spottrain.session() as", False, id="syntax-error"),
    pytest.param("import spottrain\0", False, id="not-a-source"),
    pytest.param("", False, id="empty"),
]


@pytest.mark.parametrize(("source", "wanted"), SOURCES)
def test_what_a_source_says(source: str, wanted: bool) -> None:
    assert names_session(source.encode()) is wanted


def test_a_script_is_found_where_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "program").mkdir(parents=True)
    for file in (tmp_path / "train.py", package / "train.py", package / "program" / "__main__.py"):
        file.write_text("import spottrain\nspottrain.session()")
    (package / "__init__.py").write_text("raise RuntimeError('this is not for looking to run')")
    assert opens_session(Entrypoint(script="train.py", working_dir=str(tmp_path)))
    assert opens_session(Entrypoint(module="package.train", working_dir=str(tmp_path)))
    assert opens_session(Entrypoint(module="package.program", working_dir=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("")  # where the worker puts the program's own folder
    assert opens_session(Entrypoint(module="package.program", working_dir="/"))
    assert not opens_session(Entrypoint(module="json.tool"))
    assert not opens_session(Entrypoint(script="nowhere.py", working_dir=str(tmp_path)))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with packages that nobody may import.

    Another folder has installed ones.
    """
    work, site = tmp_path / "work", tmp_path / "site"
    for file in (
        work / "mine" / "__init__.py",
        work / "mine" / "train.py",
        work / "mine" / "deep" / "train.py",
        work / "alone.py",
        work / "text.md",
        site / "theirs" / "__init__.py",
        site / "theirs" / "cli" / "__main__.py",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('this is not for looking to run')")
    (work / "elsewhere").mkdir()
    (work / "elsewhere" / "__init__.py").write_text("__path__ = ['/opt/plugins']")
    monkeypatch.syspath_prepend(str(site))
    return work


@pytest.mark.parametrize("folder", ["mnie/deep", "/nowhere/at/all"])
def test_a_folder_that_is_missing_is_named_with_the_place_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = missing_entrypoint(Entrypoint(script="train.py", working_dir=folder))
    assert failure is not None
    assert failure.message == (
        f"entrypoint.workingDir: folder {folder} does not exist in the image (looked for {tmp_path / folder}). "
        "Correct the path, or add the folder to the image. "
        "A local cluster has no images: there the folder is on your machine."
    )


@pytest.mark.parametrize(
    "module", ["mine", "mine.train", "mine.deep.train", "alone", "theirs.cli", "elsewhere.train", "json.tool"]
)
def test_a_module_that_may_exist_is_not_missed(packages: Path, module: str) -> None:
    assert missing_entrypoint(Entrypoint(module=module, working_dir=str(packages))) is None


@pytest.mark.parametrize(
    "module", ["mine.nowhere", "mine.deep.nowhere", "alone.train", "text", "theirs.train", "nobodys.train", ".train"]
)
def test_a_module_that_is_missing_is_named(packages: Path, module: str) -> None:
    failure = missing_entrypoint(Entrypoint(module=module, working_dir=str(packages)))
    assert failure is not None
    assert failure.reason is FailureReason.ENTRYPOINT_NOT_FOUND
    assert failure.message == (
        f"entrypoint.module: Python finds no module {module} in the image. "
        "Correct the name, or install it in the image."
    )


def test_an_entrypoint_that_the_system_refuses_to_look_for_is_named_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / ("n" * 300)
    failure = missing_entrypoint(Entrypoint(script=str(script)))
    assert failure is not None
    assert failure.reason is FailureReason.ENTRYPOINT_NOT_FOUND
    assert failure.message == (
        f"entrypoint: the pod's user (uid {os.getuid()}) can't reach {script}: File name too long. Correct the path, "
        "or make the file and its folders readable for that user. The folder /root usually is not."
    )
