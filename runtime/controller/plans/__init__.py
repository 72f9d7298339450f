"""Plans for the actors, and the effects of their results."""
