"""Settings of the whole suite: one compute thread, nothing fetched, no deadlines for examples."""

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile("mmrt", deadline=None)  # machines are shared: a slow example is no failure
settings.load_profile("mmrt")
