"""Value types that shared memory, messages and models agree on: no arrays, no files, no clock. Imports nothing of ours."""
