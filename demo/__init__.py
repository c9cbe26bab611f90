"""`make demo`: a job on a local cluster loses nodes, and succeeds.

It loses them with and without notice. The demo uses the product as its user does: `spottrain local`, `kubectl`, the
status of the TrainingJob. It goes through a list of incidents. Each waits until the job has settled after the one
before.
"""
