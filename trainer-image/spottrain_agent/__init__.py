"""PID 1 of a trainer pod: runs the generations that the operator assigns.

It also passes preemption notices on. The agent itself never imports torch. Its child, the *zygote*, does so once, and
each generation's torchrun and its workers are forked from there (zygote.py says why).
"""
