"""``mmrt bench goodput``: which policy or preset serves a load better, live on this machine or simulated."""
