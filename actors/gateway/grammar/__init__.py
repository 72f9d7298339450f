"""The process that compiles the grammars of answers, and the gateway's side of it."""
