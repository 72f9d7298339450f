"""Vision and audio towers."""
