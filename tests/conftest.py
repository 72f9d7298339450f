"""Settings of the whole suite: one compute thread, nothing fetched, and a per-test run directory that leaves nothing behind."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
