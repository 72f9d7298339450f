"""``mmrt bench peers``: the language model's own speed beside llama.cpp's, on the same weights and processor."""
