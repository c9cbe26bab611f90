"""`python -m spottrain_operator`: run the operator.

It runs in a pod or, with KUBECONFIG, anywhere.
"""

import gc

if __name__ == "__main__":
    # Looking for garbage among the imports takes a fifth of the start, and finds next to nothing.
    gc.disable()
    from spottrain_operator.command import main

    gc.freeze()
    # By default, it looks after 700 new objects, which takes a tenth of the time of an operator with many jobs.
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    main()
