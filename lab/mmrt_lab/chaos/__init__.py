"""``mmrt chaos``: a seeded storm of faults over a run under load, and the promises that it checks (lab/docs/chaos.md)."""
