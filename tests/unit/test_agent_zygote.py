"""What the zygote imports ahead, and what becomes of failed imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spottrain_agent.zygote import preload
from spottrain_agent.zygote_process import LAUNCH_ATTEMPTS


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "AttributeError"])
def test_a_module_that_is_not_there_is_passed_over_in_silence_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "breaks_at_import.py").write_text(f"raise {kind}('libnothing.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    preload(["json", "spottrain_api.of_another_release", "breaks_at_import"])
    assert capsys.readouterr().err == "spottrain: not preloaded: breaks_at_import (libnothing.so is missing)\n"


AGENT_WITHOUT_PAUSES = """
import sys
from spottrain_agent import zygote_process
from spottrain_agent.__main__ import main

zygote_process.RESTART_DELAY_SECONDS = 0.0
sys.exit(main())
"""


@pytest.mark.parametrize(
    "problem", ["ImportError('libcudart.so is missing')", "OSError('libcudart.so\\nis missing')"]
)
def test_an_agent_whose_image_can_not_import_torch_ends_with_that_sentence(tmp_path: Path, problem: str) -> None:
    (tmp_path / "torch.py").write_text(f"print('importing'); raise {problem}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "SPOTTRAIN_CONTROL_URL": "http://127.0.0.1:9",
        "SPOTTRAIN_POD_NAME": "a-0",
        "SPOTTRAIN_POD_UID": "u",
        "SPOTTRAIN_POD_IP": "127.0.0.1",
        "SPOTTRAIN_RUN_ROOT": str(tmp_path),
    }
    command = [sys.executable, "-c", AGENT_WITHOUT_PAUSES]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    sentence = "The image's Python can't import torch: libcudart.so is missing. Install torch in the image."
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[-1]) == (1, f"spottrain-agent: {sentence}")
    assert sum(sentence in line for line in lines[:-1]) == 1, "it is logged once, however many zygotes end with it"
    assert ended.stdout.count("importing") == LAUNCH_ATTEMPTS
