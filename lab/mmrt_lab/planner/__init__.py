"""The planner: which layout of stages over devices serves a load best (``command``), and when a live run should have another."""
