"""The policies that `plan.py` lists, and what several of them share."""
