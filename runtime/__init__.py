"""The control plane: messages, transport, configuration, pure scheduling state, supervisor."""
