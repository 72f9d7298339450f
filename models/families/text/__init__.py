"""Code shared by the families of text alone; not a family itself."""
