"""The stores that hold checkpoints: files, S3, GCS and Azure, behind one protocol."""
