"""The node runtime: an API client like a kubelet that runs the pods bound to it as processes.

What it is not: it has no containers, no images and no cgroups. `image` is accepted and ignored, resource
requests count for the scheduler but limits are not enforced, `securityContext` is accepted while every process
runs as the current user, and `kubectl exec`, `attach`, `port-forward` and `cp` are refused, for they need a
streaming protocol that nothing here speaks. It needs Linux (prctl and /proc).
"""
