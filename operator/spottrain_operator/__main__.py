"""`python -m spottrain_operator`: run the operator.

It runs in a pod or, with KUBECONFIG, anywhere.
"""

import gc

if __name__ == "__main__":
    # Looking for garbage among the imports takes a fifth of the start, and finds next to nothing.
    gc.disable()
    from spottrain_operator.command import main

    gc.freeze()
    gc.enable()
    main()
