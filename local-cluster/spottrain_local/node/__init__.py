"""The node runtime: an API client like a kubelet that runs the pods bound to it as processes.

It differs from a kubelet:

- It has no containers, no images and no cgroups. It ignores `image`.
- Resource requests count for the scheduler. Limits are not enforced.
- It accepts `securityContext`, but every process runs as the current user.
- It refuses `kubectl exec`, `attach`, `port-forward` and `cp`, since it lacks their streaming protocol.
- It needs Linux (prctl and /proc).
"""
