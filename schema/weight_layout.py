"""Numbers that those who write matrices of integers and the kernels that multiply them agree on. ``models.checkpoint.int4`` says how
they lie."""

INT8_MOST = 127  # -128 has no counterpart
INT4_MIDDLE = 8
PACKED_COLUMNS = 4  # of matrices in groups of columns, whose codes are neighbours in memory
PACKED_ROWS = 32  # of a block of such a matrix
