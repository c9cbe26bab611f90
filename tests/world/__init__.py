"""What surrounds the operator, played once for all tests and benchmarks.

Agents, ranks, notices and the clock are those of `spottrain_simulator`, a part of the product. Here are:

- `cluster`: the API server, in memory.
- `faults`: what may happen to requests to it.
- `jobs`: the jobs that they run.
- `kubelets`: what kubelets write.
- `invariants`: what holds of every plan of the operator.

Drivers let time pass in it, and disturb it: `simulation` by a seed, `operator_world` turn by turn around the real
`Reconciler`, `crash_points` and `benchmarks.scale` on a real API server. The search in `explorer` has agents and
ranks of its own, as its states are values.
"""
