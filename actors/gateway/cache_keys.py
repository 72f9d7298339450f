"""Digests by which the caches know media and tenants apart. Pure; the threads that parse bodies compute them."""

import hashlib

import msgspec

from ...schema.media import MediaKind, MediaOptions

_NUM_SALT_BYTES = 16


def content_key(kind: MediaKind, options: MediaOptions, data: bytes) -> bytes:
    """Return the sha-256 of a medium: its compressed bytes as sent, its kind and its options.

    It holds the bytes, not the pixels: two pictures of equal pixels and different sizes cannot be taken for one (CVE-2025-46722).
    """
    digest = hashlib.sha256(msgspec.msgpack.encode((kind, options)))
    digest.update(data)
    return digest.digest()


def tenant_salt(cache_salt: str | None, api_key: str) -> bytes:
    """Return a digest of the request's ``cache_salt``, else of the API key; empty without either. The journal keeps the digest only."""
    if cache_salt is not None:
        return _digest(b"cache_salt", cache_salt)
    return _digest(b"api_key", api_key) if api_key else b""


def _digest(person: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_NUM_SALT_BYTES, person=person).digest()
