"""Sharded, two-phase checkpoints for any world size, on files and object stores.

What a store holds:

    HEAD                                        the kept commits, newest first, and the fence (commits.py, head.py)
    attempts/g000003-s000000120-<unique>/       one save of generation 3 after step 120 (attempt.py)
        rank-00000.data                         raw bytes of the tensors that rank 0 wrote (dcp.py)
        rank-00000.frozen.data                  weights that aren't trained; later commits share it (frozen_files.py)
        rank-00000.receipt.json                 their places, size and checksums, and the rank's own state
        manifest.json                           all of that together, and the state that is not tensors

A save has three parts. Every rank stages its tensors (staging.py). Then a process beside the rank uploads them
(writer.py), and the rank leaves a receipt. Last, rank 0 writes the manifest and moves HEAD by compare-and-swap
(committer.py).

Only what HEAD names exists. If HEAD itself is lost, it is rebuilt from the attempts that are whole (rebuild.py).
Nothing is pickled (codec.py). After a loss without notice, the memory of members may hold newer steps (peers/).
"""
