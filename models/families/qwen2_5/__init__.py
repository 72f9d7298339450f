"""What the two Qwen2.5 families share; no family itself."""
