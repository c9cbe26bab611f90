"""The node runtime: runs the pods bound to it, as processes or with podman.

It is an API client like a kubelet.

Processes differ from a kubelet's containers:

- They have no images and no cgroups. `image` is ignored, and `args` without `command` are the command.
- Resource requests count for the scheduler. Limits are not enforced.
- `securityContext` is accepted, but every process runs as the current user.

In both cases it differs from a kubelet:

- `kubectl attach` shows standard error as standard output. What `kubectl exec` started ends with it.
- It needs Linux (prctl and /proc).
"""
