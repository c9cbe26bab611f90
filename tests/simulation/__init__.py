"""A small world in which a job's whole life passes in a second.

It has nodes, pods, agents, ranks and an operator. Only the operator's decisions are real (`plan` and
`assignment_for`). Everything else is modelled with the delays and faults that matter to them:

- Reports are late, lost or repeated.
- Notices come directly and through the node.
- Nodes go with and without notice.
- Agents restart.
- The operator crashes between any two writes, or is away for minutes.

All randomness comes from one seed.
"""
