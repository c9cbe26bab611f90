"""The world of `make bench-operator`.

It has a real API server, simulated kubelets, and agents of tests/world that call the real control API.
"""
