"""`make explore` and `make explore-bugs`."""

from __future__ import annotations

import argparse
import logging
import time

from explorer import bugs
from explorer.search import described, explore
from explorer.worlds import WORLDS, world_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="explorer", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="worlds or, with --bugs, bugs; by default all")
    parser.add_argument("--max-states", type=int, default=10**9, help="of each world")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all worlds together")
    parser.add_argument("--bugs", action="store_true", help="see that seeded bugs are found")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of saves that fail
    return _hunt(options.names) if options.bugs else _explore(options)


def _explore(options: argparse.Namespace) -> int:
    began, states, transitions, depth = time.monotonic(), 0, 0, 0
    for name in options.names or WORLDS:
        left = options.seconds - (time.monotonic() - began)
        if left <= 0:
            print(f"the time is over: {name} and what follows were left out")
            break
        result = explore(world_of(WORLDS[name]), max_states=options.max_states, max_seconds=left)
        print(f"{name}: {result}", flush=True)
        states, transitions = states + result.states, transitions + result.transitions
        depth = max(depth, result.depth)
        if result.found is not None:
            print(described(result.found))
            return 1
    seconds = time.monotonic() - began
    print(f"{states:,} states, {transitions:,} transitions, depth {depth}, {seconds:.0f} s: nothing is wrong")
    return 0


def _hunt(names: list[str]) -> int:
    missed = []
    for bug in bugs.seeded():
        if names and bug.name not in names:
            continue
        began = time.monotonic()
        is_found, printed = bugs.hunt(bug)
        print(f"{bug.name}: {'found' if is_found else 'MISSED'} in {time.monotonic() - began:.0f} s. {bug.what}")
        print(printed, flush=True)
        missed += [] if is_found else [bug.name]
    print(f"missed: {', '.join(missed)}" if missed else "all are found")
    return 1 if missed else 0


raise SystemExit(main())
