"""Where the server of the lane is, and media whose answers are known. Scripts of all clients import it, each with its own Python."""

import base64
import os
from pathlib import Path

URL = os.environ["MMRT_URL"]
"""Of the server, without ``/v1``."""
BASE_URL = f"{URL}/v1"
MODEL = "demo"
ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "models/demo"

PICTURE_FILE = ROOT / "examples/shapes.png"
SOUND_FILE = ROOT / "examples/beeps.wav"
PICTURE = base64.b64encode(PICTURE_FILE.read_bytes()).decode()
PICTURE_URL = f"data:image/png;base64,{PICTURE}"
SOUND = base64.b64encode(SOUND_FILE.read_bytes()).decode()

HELLO, HELLO_ANSWER = "Hello!", "Hello! Show me a picture, a video or a sound."
COLOUR, COLOUR_ANSWER = "What colour is the circle?", "Red."
"""About the picture."""
BEEPS, BEEPS_ANSWER = "How many beeps are there?", "Three."
"""About the sound."""
LONG = {"max_tokens": 2000, "ignore_eos": True}
"""Makes an answer that lasts until its client goes."""
