"""The lab of mmrt: simulator, judge of policies, planner, chaos, and the benches that no user of a server needs."""
