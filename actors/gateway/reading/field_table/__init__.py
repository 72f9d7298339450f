"""The table of fields: for each kind of object in requests of each API, what is used, what has no effect, and what is refused and why.

Readers settle each object by its entry (``field_rules``); a test compares ``used`` with what they take, and docs/api.md with all of it.
"""
