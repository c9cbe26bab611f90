"""What the zygote imports ahead, and what it says of failed imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain_agent.zygote import preload


def test_a_module_that_is_not_there_is_passed_over_in_silence_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("raise ImportError('libnothing.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    preload(["json", "spottrain_api.of_another_release", "breaks_at_import"])
    assert capsys.readouterr().err == "spottrain: not preloaded: breaks_at_import (libnothing.so is missing)\n"
