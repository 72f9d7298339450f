"""One module per model family: config mapping, placeholders, positions, towers."""
