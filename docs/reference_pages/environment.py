"""Every environment variable that the project sets or reads.

tests/unit/test_reference.py looks for variables in the sources and fails for one that isn't here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spottrain_api.contract import names
from spottrain_runtime.logs import ENV_LOG_FORMAT

from .markdown import entry

# Set by people: in the spec's `env`, in the chart's values, or in a shell.
IN_A_JOB: Mapping[str, str] = {
    names.ENV_AUDIT_DIR: "Folder, created if it is missing. Every rank appends the ids of the samples of each "
    "step to a file there. On a local cluster whose pods are processes, any folder of the machine does. The only "
    "name that starts with SPOTTRAIN_ and that `spec.env` may set. Default: not written.",
    "GLOO_SOCKET_IFNAME": "Network interface on which gloo listens. Default: that of the pod's IPv4 address.",
    "OMP_NUM_THREADS": "Threads with which a rank computes on the CPU. Default: its share of the pod's limit of "
    "processors, or 1 without a limit.",
    "AWS_REGION": "Region of S3. Default: AWS_DEFAULT_REGION, then us-east-1.",
    "AWS_DEFAULT_REGION": "Region of S3 if AWS_REGION is not set.",
    "AWS_ENDPOINT_URL_S3": "Address of an S3-compatible store. Default: AWS_ENDPOINT_URL, then Amazon's. "
    "`spec.checkpoint.endpointURL` takes precedence.",
    "AWS_ENDPOINT_URL": "Address of an S3-compatible store if AWS_ENDPOINT_URL_S3 is not set.",
    "AWS_MAX_ATTEMPTS": "How often a request to S3 is tried. Default: 6.",
    "AWS_METADATA_SERVICE_TIMEOUT": "Seconds to wait for an answer of EC2's metadata server. Default: 5.",
    "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "How often a request to EC2's metadata server is tried. Default: 3.",
    "AZURE_STORAGE_ACCOUNT": "Name of Azure's storage account for `az://`. `spec.checkpoint.endpointURL` takes "
    "precedence. Default: that of AZURE_STORAGE_CONNECTION_STRING.",
    "AZURE_STORAGE_KEY": "Key of the storage account. Default: that of AZURE_STORAGE_CONNECTION_STRING, then "
    "AZURE_STORAGE_SAS_TOKEN, then the pod's identity.",
    "AZURE_STORAGE_SAS_TOKEN": "Shared access signature for the container or the account. Default: that of "
    "AZURE_STORAGE_CONNECTION_STRING, then the pod's identity.",
    "AZURE_STORAGE_CONNECTION_STRING": "Address and key, or signature, of the storage account in one. The other "
    "variables take precedence.",
    "STORAGE_EMULATOR_HOST": "Address of a server that speaks Google Cloud Storage's protocol. Default: Google's.",
}
# Set by the operator in every trainer pod, read by the agent.
IN_PODS: Mapping[str, str] = {
    names.ENV_CONTROL_DIR: "Folder with the address of the control API (`url`) and the authorities that the agent "
    "trusts there (`ca.crt`). Both follow the operator while the pod runs.",
    names.ENV_TOKEN_FILE: "File with the token by which the agent authenticates to the operator.",
    names.ENV_JOB: "Name of the job.",
    ENV_LOG_FORMAT: "Form of the log lines: `text`, or `json` with job, generation and member in each line. "
    "Default: text. The chart's value `logFormat` sets it for operator, watcher and trainer pods.",
    names.ENV_NAMESPACE: "Namespace of the job.",
    names.ENV_POD_NAME: "Name of the pod.",
    names.ENV_POD_UID: "UID of the pod.",
    names.ENV_POD_IP: "Address of the pod, at which other ranks reach it.",
    names.ENV_NODE_NAME: "Name of the node. The chart also sets it for the watcher.",
    names.ENV_HOST_IP: "Address of the node, at which the watcher listens. The chart also sets it for the watcher.",
    names.ENV_WATCHER_PORT: f"Port of the watcher on the node. Default: {names.WATCHER_PORT}. The chart also "
    "sets it for operator and watcher, from its value watcher.port.",
    names.ENV_CAPACITY_TYPE: "`spot` or `on-demand`. On an on-demand node the agent asks no watcher for notices.",
    names.ENV_GPUS: "Number of NVIDIA GPUs that the trainer's container has asked for. Ranks refuse to train without "
    "them. Not set on nodes of a local cluster.",
    names.ENV_GRACE_SECONDS: "Seconds from SIGTERM to SIGKILL (`podTemplate.terminationGracePeriodSeconds`). "
    "Scripts without the library can rely on it.",
    "SPOTTRAIN_RUN_ROOT": "Folder of the run directories, one for each generation.",
}
# Set for the ranks, by torchrun and by the agent, or in the job's `env`.
IN_RANKS: Mapping[str, str] = {
    "RANK": "Number of the rank in the world, from 0. Set by torchrun.",
    "LOCAL_RANK": "Number of the rank on its node, from 0. Set by torchrun.",
    "WORLD_SIZE": "Number of ranks. Set by torchrun.",
    "LOCAL_WORLD_SIZE": "Number of ranks on this node. Set by torchrun.",
    "MASTER_ADDR": "Address of the rendezvous store. Set by torchrun.",
    "MASTER_PORT": "Port of the rendezvous store. Set by torchrun.",
    names.ENV_RUN_DIR: "Run directory of the generation. Without it a session takes its settings from its "
    "arguments, as under plain torchrun.",
    "SPOTTRAIN_SESSION_PROCESS": "Process of the rank while its session is open, so that none of its children opens "
    "another. Set by the library.",
    "CUDA_VISIBLE_DEVICES": "The GPUs to use. Empty or -1: train on the CPU, although the node has GPUs.",
    names.ENV_DRAIN_FILE: "File that appears, with the deadline as JSON, when SIGTERM is sent. For scripts "
    "without the library.",
}
OPERATOR: Mapping[str, str] = {
    "SPOTTRAIN_CONTROL_HOST": "Address on which the operator listens. Default: 0.0.0.0.",
    "SPOTTRAIN_CONTROL_PORT": f"Port of the control API. Default: {names.CONTROL_PORT}. The chart's value "
    "operator.port.",
    names.ENV_CONTROL_URL: "Address of the control API, https://host:port. The chart sets it, also for `helm test`.",
    "SPOTTRAIN_CERTIFICATE_FROM": "`operator`: the operator makes the certificate of the control API. `secret`: "
    "cert-manager writes it to the Secret spottrain-control-tls. Default: operator. Set by the chart's value "
    "operator.certificateIssuer.",
    "SPOTTRAIN_METRICS_TOKEN_FILE": "File with the token that /metrics asks for, over TLS. Default: none. Set by the "
    "chart's value operator.metricsTokenSecret.",
    "SPOTTRAIN_HEALTH_PORT": f"Port of /healthz and /readyz. Default: {names.HEALTH_PORT}. The chart's value "
    "operator.healthPort.",
    "SPOTTRAIN_METRICS_PORT": f"Port of /metrics. Default: {names.METRICS_PORT}. The chart's value "
    "operator.metricsPort.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Address of an OpenTelemetry collector (OTLP over HTTP). The operator sends it a "
    "trace for each change of members. OTEL_EXPORTER_OTLP_TRACES_ENDPOINT takes precedence. Default: no traces.",
    "SPOTTRAIN_CLIENT_BURST": "Requests to the API server at once, after a pause. The chart's value "
    "operator.client.burst.",
    "SPOTTRAIN_CLIENT_QPS": "Requests a second to the API server, on average. The chart's value operator.client.qps.",
    "SPOTTRAIN_PROGRESS_SECONDS": "Seconds between two records of a job's progress in its status, while nothing else "
    "changes, at most 120. The chart's value operator.progressSeconds.",
    "SPOTTRAIN_TIMING": 'Durations that decisions depend on, as JSON, such as `{"growth_interval": 4}`. For tests '
    "and rehearsals: no value of the chart sets it.",
    "SPOTTRAIN_LOG_LEVEL": "Level of the log. Default: INFO. The chart's value operator.logLevel.",
    "SPOTTRAIN_POD_LABELS": "Labels of the operator's pods, as `key=value,key=value`. The leader is labelled, "
    "so that the Service finds it. Default: none, so that no pod is labelled.",
    "SPOTTRAIN_WATCH_NAMESPACES": "Namespaces whose jobs the operator leads, with spaces between them. The chart's "
    "value watchNamespaces.names. Default: all.",
    "SPOTTRAIN_WATCH_LABELS": "Labels of the namespaces whose jobs the operator leads, as `key=value,key=value`. The "
    "chart's value watchNamespaces.labels. Default: all namespaces.",
    "SPOTTRAIN_SPOT_LABELS": "Labels of spot nodes beside those that are known, as `key=value,key=value`. "
    "The chart's value spotLabels. Default: none.",
    "SPOTTRAIN_ALLOWED_NETWORKS": "Values of podTemplate.network that jobs may ask for, with spaces between them. "
    "Default: none. The chart's value jobs.allowedNetworks.",
    "SPOTTRAIN_NETWORK_POLICIES": "Whether each job gets a NetworkPolicy: `true` or `false`. Default: false. "
    "The chart's value jobs.networkPolicies.",
    "SPOTTRAIN_POD_GROUPS": "Whether each job gets a PodGroup: `true` or `false`. Default: false. The chart's value "
    "jobs.podGroups.",
    "SPOTTRAIN_KUEUE": "Whether jobs may wait in queues of Kueue: `true` or `false`. Default: false. The chart's "
    "value kueue.enabled.",
    "SPOTTRAIN_KARPENTER": "Whether the operator makes NodePools of Karpenter for pools with a nodeClass: `true` or "
    "`false`. Default: false. The chart's value karpenter.enabled.",
    "SPOTTRAIN_NAMESPACES_ASSIGN_IDS": "Whether the cluster gives pods user and group ids, so that those of jobs "
    "name none: `true` or `false`. Default: false. The chart's value namespacesAssignIds.",
    names.ENV_SERVICEACCOUNT_DIR: "Folder with the token and the CA by which operator and watcher talk to "
    "Kubernetes. Default: /var/run/secrets/kubernetes.io/serviceaccount.",
    "POD_NAME": "Name by which the operator holds its lease. Default: the host's name.",
    "POD_NAMESPACE": "Namespace of the operator's lease. Default: default.",
    "KUBERNETES_SERVICE_HOST": "Address of the API server. Set by Kubernetes.",
    "KUBERNETES_SERVICE_PORT": "Port of the API server. Set by Kubernetes.",
    "KUBECONFIG": "Where an operator outside of a cluster, and the CLI, find the cluster. Default: ~/.kube/config.",
}
WATCHER: Mapping[str, str] = {
    "SPOTTRAIN_PROVIDER": "Cloud whose metadata the watcher reads: `ec2` (or `eks`, `aws`), `gce` (`gke`), `azure` "
    "(`aks`), or `other` for none. The watcher refuses any other name. Default: found by the node's provider id and "
    "labels.",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "Address of EC2's metadata server. Default: http://169.254.169.254.",
    "GCE_METADATA_HOST": "Host, and port if it is not 80, of Compute Engine's metadata server. Default: "
    "169.254.169.254.",
    "SPOTTRAIN_AZURE_METADATA_ENDPOINT": "Address of Azure's metadata server. Default: http://169.254.169.254.",
    "SPOTTRAIN_AZURE_ACKNOWLEDGE": "`true`: acknowledge an event of Azure that names this VM alone, once no trainer "
    "pod is left on the node. Azure then starts it at once. Default: events are not acknowledged.",
}
LOCAL: Mapping[str, str] = {
    "SPOTTRAIN_LOCAL_HOME": "Folder with the state of local clusters. Default: ~/.local/state/spottrain.",
    "XDG_CACHE_HOME": "Binaries are kept in its folder spottrain. Default: ~/.cache.",
    "KUBEBUILDER_ASSETS": "Folder with etcd, kube-apiserver, kube-controller-manager and kube-scheduler to use. "
    "Nothing is fetched or built then.",
    "SPOTTRAIN_BINARIES": "`fetch`: binaries of the control plane are fetched, never built. `build`: they are built, "
    "never fetched. What is in the cache is used in any case. Default: they are fetched, and built if that fails.",
    "SPOTTRAIN_KUBERNETES_MIRROR": "Address of a server with Kubernetes' binaries, laid out like the default: "
    "/release/VERSION/bin/linux/ARCHITECTURE/NAME, and NAME.sha256 beside it. Default: https://dl.k8s.io.",
    "SPOTTRAIN_ETCD_MIRROR": "Address of a server with etcd's archives, laid out like the default: "
    "/VERSION/etcd-VERSION-linux-ARCHITECTURE.tar.gz, and SHA256SUMS beside it. Default: "
    "https://github.com/etcd-io/etcd/releases/download.",
    "SPOTTRAIN_HELM_MIRROR": "Address of a server with Helm's archives, laid out like the default: "
    "/helm-VERSION-linux-ARCHITECTURE.tar.gz, and the same name with .sha256sum. Default: https://get.helm.sh.",
    "HTTPS_PROXY": "Proxy through which binaries are fetched. `NO_PROXY` names hosts without it.",
    "REQUESTS_CA_BUNDLE": "File with the authorities to trust when binaries are fetched, for a proxy that has one of "
    "its own. Default: those of certifi.",
    "XDG_CONFIG_HOME": "Where Go's settings are found when the binaries are built. Default: ~/.config.",
}
GROUPS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Variables that a job may set": ("In `spec.env`; scripts get them too.", IN_A_JOB),
    "Trainer pods": ("The operator sets these for the agent. `spec.env` can't.", IN_PODS),
    "Ranks": ("A script can read these.", IN_RANKS),
    "Operator": ("Set by the chart; others through the chart's value `operator.env`.", OPERATOR),
    "Watcher": ("Set through the chart's value `watcher.env`.", WATCHER),
    "Local cluster and CLI": ("Set in the shell.", LOCAL),
}


def environment() -> str:
    """A section for each group."""
    return "\n".join(_sections())


def described() -> frozenset[str]:
    """The names of all that have a description."""
    return frozenset(name for _, variables in GROUPS.values() for name in variables)


def _sections() -> Iterator[str]:
    for title, (text, variables) in GROUPS.items():
        yield f"## {title}\n\n{text}\n"
        yield "\n".join(entry(name, meaning) for name, meaning in variables.items())
