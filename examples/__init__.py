"""Files to ask about, and the demo model."""
