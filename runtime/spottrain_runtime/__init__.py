"""What all parts run with: logs, processes, HTTP servers, sentences. It knows nothing of jobs."""
