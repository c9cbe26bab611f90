"""The node runtime: runs the pods bound to it, as processes or with podman.

It is an API client like a kubelet.

Processes differ from a kubelet's containers:

- They have no images and no cgroups. `image` is ignored.
- Resource requests count for the scheduler. Limits are not enforced.
- `securityContext` is accepted, but every process runs as the current user.

In both cases it differs from a kubelet:

- It refuses `kubectl exec`, `attach`, `port-forward` and `cp`, since it lacks their streaming protocol.
- It needs Linux (prctl and /proc).
"""
