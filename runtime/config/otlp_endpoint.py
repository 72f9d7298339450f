"""Where traces go: the URL of a collector that takes OTLP over HTTP (pure)."""

from urllib.parse import urlsplit

PATH = "/v1/traces"  # of a collector that is given without a path, as OpenTelemetry's specification of exporters has it


def otlp_url(endpoint: str) -> str:
    """Return the URL that spans are posted to. Raises: ValueError for anything but http(s)://HOST[:PORT][/PATH]."""
    expected = "expected http://HOST:PORT or https://HOST:PORT, and a path unless it is /v1/traces"
    try:
        parts = urlsplit(endpoint)
    except ValueError as error:  # of brackets
        raise ValueError(f"{error}: {expected}") from None
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"its port is not from 1 to 65535: {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not endpoint.isprintable() or " " in endpoint:
        raise ValueError(expected)
    if parts.query or parts.fragment:
        raise ValueError(f"it has a query or a fragment: {expected}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it holds a user's name; headers for the collector go into OTEL_EXPORTER_OTLP_HEADERS")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH
