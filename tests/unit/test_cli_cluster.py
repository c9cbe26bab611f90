"""What `spottrain` says if there is no cluster to talk to."""

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain_cli.job_view import JobReader, UserError


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No configuration found"), ("a: b", "Expected key current-context in {}")],
    ids=["missing", "of no kind"],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as refused:
        JobReader(str(path))
    assert str(refused.value) == (
        f"No cluster to talk to: kubeconfig {path}: {reason.format(path)}. Set KUBECONFIG, or start a cluster with "
        "`spottrain local up`."
    )
