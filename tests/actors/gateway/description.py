"""Check that the description of the endpoint allows all that its readers take."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from mmrt.actors.gateway.openapi.operations import OPERATIONS, JsonBody
from mmrt.actors.gateway.openapi.request_schema import schema_of
from mmrt.actors.gateway.reading.validation import Limits

_VALIDATORS: dict[str, Any] = {}


def check_described(path: str, body: bytes, limits: Limits) -> None:
    """Check a body that the route takes."""
    key = path + repr(limits)
    if key not in _VALIDATORS:
        (wanted,) = [one.body for one in OPERATIONS if one.path == path and isinstance(one.body, JsonBody)]
        _VALIDATORS[key] = Draft202012Validator(schema_of(wanted.read, wanted.examples(limits.kinds), limits))
    _VALIDATORS[key].validate(json.loads(body))
