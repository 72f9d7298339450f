"""The controller process: the pure machine against the bus, the tables and the journal."""
