"""A generation of one member, without an operator."""

from __future__ import annotations

from pathlib import Path

from control_folder import control_folder
from spottrain_agent.settings import AgentSettings
from spottrain_api.contract.assignments import GenerationAssignment
from spottrain_api.settings.entrypoint import Entrypoint


def settings(run_root: Path) -> AgentSettings:
    """Those of its agent, whose operator doesn't answer."""
    return AgentSettings(
        control_dir=control_folder(run_root, "http://127.0.0.1:9"),
        token_file=None,
        pod="a",
        pod_uid="u",
        pod_ip="127.0.0.1",
        node="n",
        watcher_url=None,
        grace_seconds=30.0,
        run_root=run_root,
    )


def generation(entrypoint: Entrypoint, processes_per_node: int = 1) -> GenerationAssignment:
    return GenerationAssignment(
        number=1,
        rendezvous_id="r",
        rendezvous_endpoint="127.0.0.1:9",
        node_rank=0,
        num_nodes=1,
        processes_per_node=processes_per_node,
        entrypoint=entrypoint,
        trainer={},
    )
