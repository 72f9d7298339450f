"""The demo model's exam."""
