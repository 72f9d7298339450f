"""Digests by which the caches know media and tenants apart. Pure; the threads that parse bodies compute them."""

import hashlib

import msgspec

from ....schema.media import MediaKind, MediaOptions
from ....shm.spool import AnyBytes, pieces_of

_NUM_SALT_BYTES = 16


def content_key(kind: MediaKind, options: MediaOptions, data: AnyBytes) -> bytes:
    """Return the sha-256 of a medium: its compressed bytes as sent, its kind and its options; a share of tokens that is still unknown
    counts as all.

    It holds the bytes, not the pixels: two pictures of equal pixels and different sizes cannot be taken for one (CVE-2025-46722).
    """
    digest = hashlib.sha256(msgspec.msgpack.encode((kind, msgspec.structs.replace(options, token_share=1.0))))
    for piece in pieces_of(data):
        digest.update(piece)
    return key_of_share(digest.digest(), options.known_share)


def key_of_share(key: bytes, share: float) -> bytes:
    """Return the key of a medium with this share of its tokens, from that with all of them."""
    return key if share == 1 else hashlib.sha256(key + msgspec.msgpack.encode(share)).digest()


def key_among_others(key: bytes) -> bytes:
    """Return the key of a picture among others, from that of one which is alone, where models cut only the latter into tiles."""
    return hashlib.sha256(key + b"among others").digest()


def key_salt(digest: bytes, own: str | None = None) -> bytes:
    """Return the salt of an API key with this sha-256: of its own salt (``cache_salt`` in the file of keys), else of the key."""
    return _digest(b"api_key", digest) if own is None else _digest(b"key_salt", own.encode())


def tenant_salt(cache_salt: str | None, of_key: bytes) -> bytes:
    """Return a digest of the request's ``cache_salt`` among those of its API key's salt, else that; empty without either. The journal
    keeps the digest only."""
    return of_key if cache_salt is None else _digest(b"cache_salt", cache_salt.encode(), of_key)


def _digest(person: bytes, data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=_NUM_SALT_BYTES, person=person, key=key).digest()
