"""What the actors have in common: their process, their bus, their device, the loop over plans."""
