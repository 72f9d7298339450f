"""Commands of ``mmrt`` that come with the lab, named in its pyproject.toml."""
