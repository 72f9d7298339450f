"""Training of the demo model that ships as ``models/demo``: one command, one recipe, material from ``bench.demo_data``.

``python -m mmrt.bench.demo_train OUT`` trains, continues what was interrupted, and writes the checkpoint directory.
"""
