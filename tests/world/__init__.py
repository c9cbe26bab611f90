"""What surrounds the operator, played once for all tests and benchmarks.

- `cluster`: the API server, in memory.
- `faults`: what may happen to requests to it.
- `clock`: the time of worlds that have their own.
- `jobs`: the jobs that they run.
- `kubelets`: what kubelets write.
- `notices`: what clouds and kubelets announce.
- `agents`: the agent of a pod. Its state machine is the real one.
- `ranks`: the ranks of a job: they meet, make steps, commit and end.
- `invariants`: what holds of every plan of the operator.

Drivers let time pass in it, and disturb it: `simulation` by a seed, `operator_world` turn by turn around the real
`Reconciler`, `crash_points` and `benchmarks.scale` on a real API server. The search in `explorer` has agents and
ranks of its own, as its states are values.
"""
