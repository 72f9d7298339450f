"""Code shared by Qwen3-VL and Qwen3.5; not a family itself."""
