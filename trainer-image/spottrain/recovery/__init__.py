"""When a run saves, what it saves, and where it resumes."""
