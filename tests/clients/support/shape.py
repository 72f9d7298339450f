"""The structured output that clients ask for. The demo model knows no JSON, so the schema bounds the length of an answer."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """A shape."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green"]
    corners: Literal[3, 4, 5]


PAINT = {"type": "function", "function": {"name": "paint", "parameters": Shape.model_json_schema()}}
