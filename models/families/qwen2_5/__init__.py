"""Code shared by Qwen's families that see and hear; not a family itself."""
