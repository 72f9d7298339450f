"""``mmrt bench sim`` and ``mmrt bench profile``: the controller's own machine and policies among modelled actors."""
