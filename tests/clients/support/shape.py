"""What clients ask for as structured output. The demo model knows no JSON: the schema bounds how long an answer can be."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """A shape."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green"]
    corners: Literal[3, 4, 5]


PAINT = {"type": "function", "function": {"name": "paint", "parameters": Shape.model_json_schema()}}
