"""What a node's labels say about how it goes."""

from __future__ import annotations

from collections.abc import Mapping

# Labels that GKE puts on its spot nodes, and on their predecessors.
GKE_SPOT = "cloud.google.com/gke-spot"
GKE_PREEMPTIBLE = "cloud.google.com/gke-preemptible"
# For whoever sets up a pool of nodes: how many seconds the kubelet gives pods when the node shuts down.
LABEL_SHUTDOWN_GRACE = "spottrain.dev/shutdown-grace-seconds"

# What nodes with these labels give pods by default, in seconds, whatever grace the pods ask for.
# GKE: 15 for pods, then 15 for critical ones. A pool may ask for more, up to 120, from 1.35 on.
# https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
_PROVIDERS_SHUTDOWN_GRACE = {GKE_SPOT: 15.0, GKE_PREEMPTIBLE: 15.0}


def shutdown_grace_seconds(labels: Mapping[str, str]) -> float | None:
    """Seconds that the shutdown of the node leaves its pods; None if nothing limits a pod's own grace."""
    stated = labels.get(LABEL_SHUTDOWN_GRACE, "")
    if stated.isdecimal():
        return float(stated)
    known = (grace for label, grace in _PROVIDERS_SHUTDOWN_GRACE.items() if labels.get(label) == "true")
    return min(known, default=None)
