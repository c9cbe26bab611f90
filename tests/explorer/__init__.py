"""A model checker over the real code: all interleavings of a small world.

The operator's `plan` and assignments, the agent's state machine and verdicts, the step loop with its agreement, and
the commit protocol are the real ones. `docs/design/project-fault-tests.md` says what is modelled around
them, and what the small world leaves out.
"""
