"""``python -m mmrt_demo_model.exam``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
