"""Sphinx extension that puts generated reference text into pages.

It does so at build time, so that the text can't be stale.

A page under docs/reference/ marks the place with a line `<!-- generated: NAME -->`; `GENERATORS` has the function
that writes the Markdown for each name, from the models, tables and sources that the code itself uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.util import logging

from . import chart, environment, job_metrics, names, node_pools, python_classes, reasons, trainingjob

if TYPE_CHECKING:
    from sphinx.application import Sphinx

GENERATORS: Mapping[str, Callable[[], str]] = {
    "spec": trainingjob.spec,
    "status": trainingjob.status,
    "columns": trainingjob.printer_columns,
    "metrics": job_metrics.metrics,
    "watchermetrics": job_metrics.watcher_metrics,
    "environment": environment.environment,
    "names": names.names,
    "taints": names.taints,
    "phases": reasons.phases,
    "conditions": reasons.conditions,
    "events": reasons.events,
    "causes": reasons.causes,
    "failures": reasons.failures,
    "chart": chart.values,
    "pools": node_pools.pools,
    "interruptions": node_pools.interruptions,
}
DOCS = Path(__file__).parents[1]
CHECKOUT = DOCS.parent
REPOSITORY = "https://github.com/spottrain/spottrain/blob/main"
MARKER = re.compile(r"^<!-- generated: ([a-z]+) -->$", re.MULTILINE)
OUTWARD_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]*)\)")
logger = logging.getLogger(__name__)


def expand(text: str) -> str:
    """The text of a page with what its markers stand for."""
    return MARKER.sub(lambda marker: GENERATORS[marker[1]](), text)


def point_to_repository(text: str, page: Path) -> tuple[str, list[str]]:
    """Point links that leave docs/ to the repository's site.

    Returns:
        The text with these links, and those of them that lead nowhere.
    """
    lost: list[str] = []

    def turned(link: re.Match[str]) -> str:
        path, _, fragment = link[1].partition("#")
        target = (page.parent / path).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            lost.append(link[1])
        return f"]({REPOSITORY}/{target.relative_to(CHECKOUT)}{'#' if fragment else ''}{fragment})"

    return OUTWARD_LINK.sub(turned, text), lost


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    source[0], lost = point_to_repository(expand(source[0]), page)
    for link in lost:
        logger.warning("there is no file %s", link, location=docname, type="reference")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", python_classes.add_attributes, priority=400)  # before napoleon's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
