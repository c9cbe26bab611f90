"""The file that `spottrain local up --nodes` reads, from its models."""

from __future__ import annotations

from docs.reference_pages.trainingjob import sections

from spottrain_api.crd import structural_schema
from spottrain_local.spec import NodePool


def pools() -> str:
    """The fields of a pool, and of what is inside it."""
    return "\n".join(sections("nodes[]", structural_schema(NodePool)))
