"""What every process of a run shares: the run itself, signs of life, and how processes end."""
