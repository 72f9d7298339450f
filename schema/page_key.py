"""The size of a key: the name of a page's contents in the index of its pool, in the controller and in files of pages."""

KEY_BYTES = 16
