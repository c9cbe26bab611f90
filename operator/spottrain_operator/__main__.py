"""`python -m spottrain_operator`: run the operator.

It runs in a pod or, with KUBECONFIG, anywhere.
"""

import gc
import sys

if __name__ == "__main__":
    # Looking for garbage among the imports takes a fifth of the start, and finds next to nothing.
    gc.disable()
    # kopf imports the models of the Kubernetes client if they are installed: 44 MiB that nothing here uses.
    sys.modules["kubernetes"] = None  # type: ignore[assignment]
    from spottrain_operator.command import main

    gc.freeze()
    # By default, it looks after 700 new objects, which takes a tenth of the time of an operator with many jobs.
    # With a number much higher than this, connections that have ended take memory for hours.
    gc.set_threshold(10_000, 20, 10)
    gc.enable()
    main()
