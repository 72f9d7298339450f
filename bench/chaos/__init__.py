"""``mmrt chaos``: a seeded storm of faults over a run under load, and what must hold in it (docs/chaos.md)."""
