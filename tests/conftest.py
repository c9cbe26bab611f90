"""Fixtures that several folders of tests share."""

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# A search for garbage among what is imported and collected takes a third of the time, and finds next to nothing.
gc.disable()

# importlib mode leaves sys.path alone; the shared plugins lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

# What it asserts is told as a test's own assertions are.
pytest.register_assert_rewrite("trainer_runs")
pytest_plugins = [
    "shared_clusters",
    "chart_site",
    "container_fixtures",
    "draws",
    "object_stores",
    "forked_ranks",
    "one_rank_worlds",
    "agent_pods",
]

# kopf makes these in its thread when it first starts, while pytest may be going through all loggers.
for _activity in ("startup", "authentication", "cleanup"):
    logging.getLogger(f"kopf.activities.{_activity}")

# What no test module imports when it is collected: each takes half a second to three seconds.
SLOW_IMPORTS = {"accelerate", "deepspeed", "jsonschema", "lightning", "peft", "torch._dynamo", "transformers"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--containers", action="store_true", help="also run the tests that need podman and root")


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = config.getoption("--containers")
    return [f"containers: {'run with podman' if run else 'left out; `make test-containers` runs them'}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that this machine can't run, and put the long ones first.

    Tests that need a GPU run only if there is one, and those that need podman only with `--containers`.
    """
    if with_addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"Processes of xdist name these tests differently; give them ids: {with_addresses}")
    if imported := SLOW_IMPORTS & sys.modules.keys():
        raise pytest.UsageError(f"Let the tests that need them import these, or each process does: {imported}")
    if not Path("/dev/nvidiactl").exists():
        _leave_out("gpu", config, items)
    if not config.getoption("--containers"):
        _leave_out("containers", config, items)
    # A cluster that runs takes a twelfth of a processor, even if nothing uses it: its tests come one after the other.
    last = {item.path for item in items if item.get_closest_marker("cluster") is not None}
    items.sort(key=lambda item: (_folder(item) != "e2e", _folder(item) == "unit", item.path in last))


def pytest_collection_finish() -> None:
    """Leave all that is there by now out of later searches for garbage."""
    gc.freeze()
    gc.enable()


def _leave_out(mark: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    without = [item for item in items if item.get_closest_marker(mark) is not None]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


# Files whose tests run one at a time, by what they share; the other end-to-end tests share a cluster and its nodes.
LANES = {
    "many jobs": ("e2e/test_bad_input.py", "e2e/test_walkthrough.py"),
    # They use the fixture `whole_cluster`.
    "a whole cluster": (
        "integration/test_chart_crds.py",
        "integration/test_chart_on_cluster.py",
        "integration/test_crd_changes.py",
        "integration/test_local_cluster.py",
        "integration/test_local_cluster_install.py",
        "integration/test_operator_outage.py",
    ),
}


class FilesAtOnce(LoadScopeScheduling):
    """Tests of several files may run at once, but not those of one lane."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0].removeprefix("tests/")
        lanes = (lane for lane, files in LANES.items() if path in files)
        return next(lanes, "end to end" if path.startswith("e2e/") else path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAtOnce:
    """With `--numprocesses`."""
    return FilesAtOnce(config, log)
