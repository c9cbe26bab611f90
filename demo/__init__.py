"""`make demo`: a job trains on a local cluster, loses nodes with and without notice, and ends as if nothing happened.

It uses the product as its user does: `spottrain local`, `kubectl`, the status of the TrainingJob. What it does to
the job is a list of incidents; each waits until the job has settled after the one before.
"""
