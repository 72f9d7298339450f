"""API keys, their limits, TLS, and the hosts and origins that are allowed."""
