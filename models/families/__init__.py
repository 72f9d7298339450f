"""One module or package per model family, and code that families share. ``registry`` lists them, ``family`` is their interface."""
