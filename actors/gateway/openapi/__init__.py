"""The description of the endpoint, ``GET /openapi.json`` (OpenAPI 3.1)."""
