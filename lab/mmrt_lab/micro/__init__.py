"""Single mechanisms: bus, journal, recorder, the runtime with a model that computes nothing."""
