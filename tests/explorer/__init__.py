"""A model checker over the real code: all interleavings of a small world.

The operator's `plan` and assignments, the agent's state machine and verdicts, the step loop with its agreement, and
the commit protocol are the real ones. `docs/design/2026-11-22-project-model-checker.md` says what is modelled around
them, and what the small world leaves out.
"""
