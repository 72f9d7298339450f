"""The controller's decisions as functions of values: no clock, file, socket, tensor or log."""
