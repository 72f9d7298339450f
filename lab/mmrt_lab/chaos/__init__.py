"""``mmrt chaos``: a seeded storm of faults over a run under load, and the promises that it checks (docs/chaos.md)."""
