"""The demo model: its data, its training, its exam."""
