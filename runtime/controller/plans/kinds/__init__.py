"""The kinds of plans, one in each file; ``table`` has all."""
