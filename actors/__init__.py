"""The processes: receive, decide, act, send."""
