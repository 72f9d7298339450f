"""The decode actor: continuous batching over the running set."""
