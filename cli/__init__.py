"""The mmrt command line: one module per command."""
