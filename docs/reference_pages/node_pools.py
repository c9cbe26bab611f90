"""Nodes of the local cluster: their file, and what their clouds announce."""

from __future__ import annotations

from docs.reference_pages.markdown import code, table
from docs.reference_pages.trainingjob import sections

from spottrain_api.crd import structural_schema
from spottrain_local.metadata.interruption import KINDS_OF_PROVIDER
from spottrain_local.spec import NodePool


def pools() -> str:
    """The fields of a pool, and of what is inside it."""
    return "\n".join(sections("nodes[]", structural_schema(NodePool)))


def interruptions() -> str:
    """What can be announced to nodes of each provider."""
    rows = ((code(name), ", ".join(map(code, kinds))) for name, kinds in KINDS_OF_PROVIDER.items())
    return table(("provider", "`--kind`"), rows)
