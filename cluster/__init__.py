"""Several nodes behind one endpoint, by Ray Serve (extra ``ray``): a replica is one whole run of mmrt. See docs/cluster.md.

``routing`` and ``request_features`` are pure; ``front`` is an ASGI application; ``node`` owns a run; ``app`` alone knows Ray.
"""
