"""What a pod needs for a network between GPUs: `podTemplate.network`.

Sources: the EFA cheat sheet of aws-samples/awsome-distributed-training (environment), kernel and libfabric for locked
memory, and the release notes of GPUDirect-TCPX in GoogleCloudPlatform/container-engine-accelerators (22 June 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain_api.v1alpha1.containers import OWN_PREFIX
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_operator.kube.resources import Manifest

_TCPX = f"{OWN_PREFIX}tcpx"
_TCPX_SOCKETS = {"name": _TCPX, "mountPath": "/run/tcpx"}
_NVIDIA_LIBRARIES = {"name": f"{OWN_PREFIX}nvidia", "mountPath": "/usr/local/nvidia/lib64", "readOnly": True}
_TCPX_DEVICES = (*(f"/dev/nvidia{number}" for number in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What the operator adds to a pod.

    The trainer runs as root, and the user's environment takes precedence.

    Attributes:
        capabilities: Of the trainer.
        sidecars, volumes, mounts: As in a pod; the mounts are the trainer's.
    """

    env: Mapping[str, str]
    capabilities: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    sidecars: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()


_PRESETS: Mapping[Network, Preset] = {
    Network.EFA: Preset(
        # RDMA pins memory. The kernel lets a process do so without a limit only if it has this capability, and
        # Kubernetes gives capabilities to root alone.
        capabilities=("IPC_LOCK",),
        env={
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",
            # Ranks fork the workers that load data. A fork fails if it has to copy huge pages, and there are no more.
            "FI_EFA_USE_HUGE_PAGE": "0",
        },
    ),
    # NCCL ends with an error if it finds no InfiniBand. By itself it would use TCP.
    Network.INFINIBAND: Preset(capabilities=("IPC_LOCK",), env={"NCCL_NET": "IB"}),
    Network.TCPX: Preset(
        env={
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NCCL_ALGO": "Ring,Tree",
            "NCCL_PROTO": "Simple",
            "NCCL_CROSS_NIC": "0",
            "NCCL_NET_GDR_LEVEL": "PIX",
            "NCCL_P2P_PXN_LEVEL": "0",
            "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
            "NCCL_P2P_NET_CHUNKSIZE": "524288",
            "NCCL_P2P_PCI_CHUNKSIZE": "524288",
            "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
            "NCCL_BUFFSIZE": "4194304",
            "NCCL_NSOCKS_PERTHREAD": "4",
            "NCCL_SOCKET_NTHREADS": "1",
            "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
            "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
            "NCCL_GPUDIRECTTCPX_TX_BINDINGS": (
                "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
            ),
            "NCCL_GPUDIRECTTCPX_RX_BINDINGS": (
                "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"
            ),
            "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
            "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": _TCPX_SOCKETS["mountPath"],
        },
        annotations={
            # GKE's device injector gives these to the daemon, which doesn't ask for GPUs.
            f"devices.gke.io/container.{_TCPX}": "".join(f"- path: {device}\n" for device in _TCPX_DEVICES),
            "networking.gke.io/default-interface": "eth0",
        },
        sidecars=(
            {
                "name": _TCPX,
                "image": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.15",
                "command": ["/tcpgpudmarxd/build/app/tcpgpudmarxd"],
                "args": [
                    *("--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd"),
                    *("--uds_path", _TCPX_SOCKETS["mountPath"], "--setup_param", r"\"--verbose 128 2 0 \""),
                ],
                "env": [{"name": "LD_LIBRARY_PATH", "value": _NVIDIA_LIBRARIES["mountPath"]}],
                "securityContext": {
                    "runAsUser": 0,
                    "runAsNonRoot": False,
                    "capabilities": {"add": ["NET_ADMIN"]},
                },
                "volumeMounts": [
                    _TCPX_SOCKETS,
                    _NVIDIA_LIBRARIES,
                    {"name": f"{OWN_PREFIX}sys", "mountPath": "/hostsysfs"},
                    {"name": f"{OWN_PREFIX}proc-sys", "mountPath": "/hostprocsysfs"},
                ],
            },
        ),
        volumes=(
            {"name": _TCPX, "emptyDir": {}},
            {"name": _NVIDIA_LIBRARIES["name"], "hostPath": {"path": "/home/kubernetes/bin/nvidia/lib64"}},
            {"name": f"{OWN_PREFIX}sys", "hostPath": {"path": "/sys"}},
            {"name": f"{OWN_PREFIX}proc-sys", "hostPath": {"path": "/proc/sys"}},
        ),
        mounts=(_TCPX_SOCKETS, _NVIDIA_LIBRARIES),
    ),
}


def preset_of(network: Network | None) -> Preset | None:
    """What the network needs; None for TCP over the pods' network."""
    return None if network is None else _PRESETS[network]
