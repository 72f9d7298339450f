"""Observation of a run from outside: flight records, traces, inspection, captures, the debugger."""
