"""What operators see of requests: metrics, traces, the log."""
