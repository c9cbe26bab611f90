"""The functional core: what is observed goes in, what to do comes out.

No clock, no I/O, no logging.
"""
