"""Code shared by all processes of a run: joining it, signs of life, and how processes end."""
