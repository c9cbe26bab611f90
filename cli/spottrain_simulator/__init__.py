"""A simulated cloud, in which a job's whole life passes in seconds.

The operator's decisions (`plan` and `assignments_for`) and the agents' states are real. The rest is played:

- `clock`: the time.
- `notices`: what clouds and kubelets announce.
- `agents`: the agent of a pod. Its state machine is the real one.
- `ranks`: the ranks of a job: they meet, make steps, commit and end.
- `machines`: nodes and pods.
- `world`: all of them, and the operator's passes.
"""
