"""Pure scheduling decisions: functions of values, no clock, socket, tensor or await."""
