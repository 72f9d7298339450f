"""Training of the demo model that ships as ``models/demo``: one command, one recipe, material from ``demo_model.data``.

``python -m mmrt_demo_model.training OUT`` trains, continues what was interrupted, and writes the checkpoint directory.
"""
