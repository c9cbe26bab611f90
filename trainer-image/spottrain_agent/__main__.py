"""`python -m spottrain_agent`: the entrypoint of a trainer pod."""

import signal
import sys

if __name__ == "__main__":
    # PID 1 loses a signal that comes before its handler is there, as during the imports. A blocked one waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    from spottrain_agent.command import main

    sys.exit(main())
