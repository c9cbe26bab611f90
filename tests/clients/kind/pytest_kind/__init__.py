"""Stands in for pytest-kind, which would download kind: the cluster is the one of KUBECONFIG."""
