"""A simulated cloud in which a job's whole life passes in a second, disturbed by a seed.

The operator's decisions (`plan` and `assignment_for`) and the agents' states are real. Everything else is modelled
with the delays and faults that matter to them:

- Reports are late, lost or repeated.
- Notices come directly and through the node.
- Nodes go with and without notice.
- Agents restart.
- The operator crashes between any two writes, or is away for minutes.
"""
