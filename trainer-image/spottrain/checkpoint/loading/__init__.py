"""From a commit to a state in memory, and to the file formats of other libraries."""
