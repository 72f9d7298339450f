"""Reading a checkpoint's files."""
