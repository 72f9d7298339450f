"""Numbers that those who write matrices of integers and the kernels that multiply them agree on. ``models.checkpoint.int8g`` and
``int4`` say how they lie."""

INT8_MOST = 127  # -128 has no counterpart
INT8G_COLUMNS = 32  # of a group
INT4_MIDDLE = 8
PACKED_COLUMNS = 4  # of matrices in groups of columns, whose codes are neighbours in memory
PACKED_ROWS = 32  # of a block of such a matrix
