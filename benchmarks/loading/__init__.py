"""Loading data from shards: spottrain and its peers, each in a process of its own."""
