"""The page on installing names every extra."""

from __future__ import annotations

import re

from distribution import PROJECT, ROOT


def test_the_page_on_installing_describes_every_extra() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    described = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(PROJECT["optional-dependencies"])
