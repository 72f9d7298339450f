"""How work becomes plans for the actors, and what their results change."""
