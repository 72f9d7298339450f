"""Driving an OpenAI-compatible server with a seeded workload."""
