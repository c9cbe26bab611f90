"""The world of `make bench-operator`.

It has a real API server, simulated kubelets, and agents that call the real control API.
"""
