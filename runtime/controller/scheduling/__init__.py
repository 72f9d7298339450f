"""Pure scheduling decisions: functions of values, without clocks, sockets, tensors or awaits."""
