"""Grammars that an answer must follow, by the library llguidance: from a client's schema to the tokens that may come next."""
