"""The simulated cloud of `spottrain_simulator`, with faults from a seed: a job's whole life passes in a second.

Everything but the operator's decisions and the agents' states is modelled with the delays and faults that matter to
them:

- Reports are late, lost or repeated.
- Notices come directly and through the node.
- Nodes go with and without notice.
- Agents restart.
- The operator crashes between any two writes, or is away for minutes.
"""
