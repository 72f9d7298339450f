"""The page at ``/``: a playground, the live pipeline, and a waterfall of requests."""
