"""`make demo`: a job trains on a local cluster, loses nodes with and without notice, and succeeds.

It uses the product as its user does: `spottrain local`, `kubectl`, the status of the TrainingJob. It goes through a
list of incidents. Each waits until the job has settled after the one before.
"""
