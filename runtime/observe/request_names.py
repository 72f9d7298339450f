"""How requests are named where people read and type names (pure): a short form of the id, and any beginning of it."""

_SHOWN_CHARS = 8  # of the random part: enough to be told apart


def short_name(request_id: str, key: str = "") -> str:
    """Return the short form of an id such as chatcmpl-… or msg_…, which every command takes; of the key where there is no id."""
    own = _own_part(request_id)
    return request_id[: len(request_id) - len(own) + _SHOWN_CHARS] if request_id else key


def is_named(wanted: str, request_id: str, key: str) -> bool:
    """Return whether a request's id, its part that is the request's own, or its key begins so."""
    return bool(wanted) and any(name.startswith(wanted) for name in (request_id, _own_part(request_id), key))


def _own_part(request_id: str) -> str:
    """Return an id without the prefix that says what it is of."""
    return request_id[max(request_id.rfind("-"), request_id.rfind("_")) + 1 :]
