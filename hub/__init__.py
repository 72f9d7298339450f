"""Models by name: what a hub (huggingface.co, or a mirror) has of one, and what is fetched of it into the cache that programs share.

The command line calls it; no actor does.
"""
