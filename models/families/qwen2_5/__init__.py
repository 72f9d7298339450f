"""Code shared by the two Qwen2.5 families; not a family itself."""
