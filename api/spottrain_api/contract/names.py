"""Names that several parts share.

They are labels and annotations, paths and ports, environment variables, and files of a run directory.
"""

from __future__ import annotations

GROUP = "spottrain.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
PLURAL = "trainingjobs"
KIND = "TrainingJob"

# Labels and annotations of the pods that the operator creates.
LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_CAPACITY_TYPE = f"{GROUP}/capacity-type"
LABEL_SEQUENCE = f"{GROUP}/sequence"
LABEL_TEMPLATE_HASH = f"{GROUP}/template-hash"
ANNOTATION_POOL = f"{GROUP}/pool"
ANNOTATION_POOL_HASH = f"{GROUP}/pool-hash"
# Of the operator's pods, the one that leads has this label, with the value "true".
LABEL_LEADER = f"{GROUP}/leader"
# Of the Workloads with which the operator asks Kueue for quota: for which part of the job.
LABEL_PART = f"{GROUP}/part"
# Of these, and of the NodePools that it makes: what is asked for.
LABEL_CONTENT = f"{GROUP}/content"
# Of the NodePools, which are in no namespace: that of their job.
LABEL_NAMESPACE = f"{GROUP}/namespace"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "spottrain"
# The container of a trainer pod that runs the agent.
TRAINER_CONTAINER = "trainer"

# On a job: the LocalQueue of Kueue that it waits in, and its WorkloadPriorityClass.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"

# On an operator's lease: the namespaces whose jobs it leads, as JSON.
ANNOTATION_WATCHED = f"{GROUP}/watched-namespaces"

# The watcher marks a node that will be gone soon: with the Notice as JSON, and with a taint against new pods.
ANNOTATION_NOTICE = f"{GROUP}/notice"
TAINT_PREEMPTION = f"{GROUP}/preemption"
# By it, agents know the watcher of their node: the SHA-256 of its proof.
ANNOTATION_WATCHER = f"{GROUP}/watcher"

# With these, a member's pod asks Karpenter and the cluster autoscaler to leave its node alone.
# https://karpenter.sh/docs/concepts/disruption/
# https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
ANNOTATION_DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
ANNOTATION_SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"

# Where a trainer pod reaches the control API, and the authorities (PEM) that it trusts there. The operator keeps both
# up to date while the pod runs. The kubelet writes them into files, beside the token.
ANNOTATION_CONTROL_URL = f"{GROUP}/control-url"
ANNOTATION_CONTROL_CA = f"{GROUP}/control-ca"
FILE_CONTROL_URL = "url"
FILE_CONTROL_CA = "ca.crt"

# Audience of the projected token with which an agent authenticates to the operator.
TOKEN_AUDIENCE = "spottrain"

# The control API.
CONTROL_PORT = 8443
# The operator's ports for the kubelet's probes and for Prometheus.
HEALTH_PORT = 8081
METRICS_PORT = 9402
# The watcher's notice API.
WATCHER_PORT = 9401
# Long polls of either API end after this many seconds with 204.
LONG_POLL_SECONDS = 25.0
# Agents ask for longer polls with `?wait=`, in seconds, of at most this.
MAX_LONG_POLL_SECONDS = 240.0
# Header of the answer to a report: how often an agent has to report while it has no news.
REPORT_SECONDS_HEADER = "Spottrain-Report-Seconds"
# As often as the operator records the progress of a job by default.
REPORT_SECONDS = 45.0
# The same for members other than node rank 0, whose progress no status shows.
QUIET_REPORT_SECONDS = 240.0
PATH_ASSIGNMENT = "/v1/assignment"
PATH_REPORT = "/v1/report"
PATH_NOTICE = "/v1/notice"
# Header with which whoever holds replicas reports the processor time that it took to receive an object.
PROCESSOR_SECONDS = "Spottrain-Processor-Seconds"

# Address of the control API, for the operator itself and its self-check.
ENV_CONTROL_URL = "SPOTTRAIN_CONTROL_URL"

# Environment of a trainer pod, read by the agent.
ENV_CONTROL_DIR = "SPOTTRAIN_CONTROL_DIR"
ENV_TOKEN_FILE = "SPOTTRAIN_TOKEN_FILE"
ENV_JOB = "SPOTTRAIN_JOB"
ENV_NAMESPACE = "SPOTTRAIN_NAMESPACE"
ENV_POD_NAME = "SPOTTRAIN_POD_NAME"
ENV_POD_UID = "SPOTTRAIN_POD_UID"
ENV_POD_IP = "SPOTTRAIN_POD_IP"
ENV_NODE_NAME = "SPOTTRAIN_NODE_NAME"
ENV_HOST_IP = "SPOTTRAIN_HOST_IP"
ENV_WATCHER_PORT = "SPOTTRAIN_WATCHER_PORT"
ENV_CAPACITY_TYPE = "SPOTTRAIN_CAPACITY_TYPE"
# Folder of the mounted service account, for the parts that talk to Kubernetes (operator, watcher). The variable, and
# where kubelets mount it.
ENV_SERVICEACCOUNT_DIR = "SPOTTRAIN_SERVICEACCOUNT_DIR"
SERVICEACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"

# Number of NVIDIA GPUs that the trainer's container has asked for.
ENV_GPUS = "SPOTTRAIN_GPUS"

# Environment of the ranks, in addition to torchrun's variables.
ENV_RUN_DIR = "SPOTTRAIN_RUN_DIR"
# For scripts that don't use the library: the grace period that they can count on, and the file with the actual
# deadline (a DrainRequest) that appears when SIGTERM is sent.
ENV_GRACE_SECONDS = "SPOTTRAIN_GRACE_SECONDS"
ENV_DRAIN_FILE = "SPOTTRAIN_DRAIN_FILE"
# If set, every rank appends the ids of the samples it used, step by step, to a file in this folder.
ENV_AUDIT_DIR = "SPOTTRAIN_AUDIT_DIR"

# Files of a generation's run directory.
FILE_RUN = "run.json"  # TrainerConfig, written by the agent before the ranks start
FILE_DRAIN = "drain.json"  # DrainRequest, written by the agent
FILE_AT_RISK = "at-risk"  # empty; the agent keeps it there while a cloud recommends to leave the node


def progress_file(local_rank: int) -> str:
    """Name of the file in which a rank keeps its newest `Progress`."""
    return f"progress-{local_rank}.json"


def outcome_file(local_rank: int) -> str:
    """Name of the file in which a rank leaves its `Outcome` before it ends."""
    return f"outcome-{local_rank}.json"
