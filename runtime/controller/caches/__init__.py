"""Caches for later requests and for others that run now: KV pages, embedding pages, and the work on equal media."""
