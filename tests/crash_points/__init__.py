"""Crashes of the operator at each of its writes, against a real API server.

A scenario is a short piece of a job's life: its start, its growth, a preemption. It runs once undisturbed, through a
proxy that counts the operator's writes and the events that it is shown. Then it runs again for each of them: the
operator is killed before or after the write, the event is lost. Each run must end as the undisturbed one.
"""
