"""What studies and proves mmrt: simulator, judge of policies, planner, chaos, and the benches that no user of a server needs."""
