"""The stores that hold checkpoints: files, S3 and GCS, behind one protocol."""
