"""Shared by the actors: their process, bus and device, and the loop over plans."""
