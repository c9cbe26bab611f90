"""`make check` runs the tests that a change touches."""

import pytest

from touched import ROOT, touched_tests


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        pytest.param("tests/e2e/test_editing.py", "e2e/test_editing.py", id="the test itself"),
        pytest.param("tests/trainer_runs.py", "integration/test_trainer_faults.py", id="what it imports"),
        pytest.param("tests/integration/trainer_script.py", "integration/test_trainer_faults.py", id="its script"),
        pytest.param("examples/gpt/train.py", "integration/test_examples_alone.py", id="an example"),
        pytest.param("charts/spottrain/values.yaml", "integration/test_chart_policies.py", id="the chart"),
        pytest.param(
            "trainer-image/spottrain/checkpoint/checkpointer.py", "integration/test_engine_ranks.py", id="a module"
        ),
    ],
)
def test_a_test_is_touched_by(changed: str, test: str) -> None:
    assert (ROOT / changed).is_file(), "the case is out of date"
    assert ROOT / "tests" / test in touched_tests([ROOT / changed])


def test_a_test_is_not_touched_by_what_product_code_imports() -> None:
    assert touched_tests([ROOT / "trainer-image/spottrain/checkpoint/saving/known_plan.py"]) == []


def test_unit_tests_are_left_out() -> None:
    assert touched_tests([ROOT / "tests/unit/test_touched.py"]) == []
