"""The configuration of a run: its sections, how it is read, and what is said of one that is wrong."""
