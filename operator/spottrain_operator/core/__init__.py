"""The functional core: what is observed goes in, what to do comes out.

`plan.py` decides about a job, by `policies/`. `assignments.py` decides what agents do. No clock, no I/O, no logging.
"""
