"""Stands in for pytest-kind, which would download kind.

The cluster is the one of KUBECONFIG.
"""
