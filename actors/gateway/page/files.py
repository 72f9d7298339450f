"""The files of the page, read once: no path of a request ever reaches the file system."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Scripts and styles of this server alone, no inline ones; nothing that would interpret text as HTML (trusted types).
_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(self), geolocation=(), display-capture=()",
}


class PageFile(NamedTuple):
    """A file as it is served; ``etag`` is a digest of its content."""

    body: bytes
    content_type: str
    etag: str

    async def serve(self, http: web.Request) -> web.Response:
        """Answer with the file, or 304 to a browser that has it."""
        headers = {**HEADERS, "ETag": f'"{self.etag}"', "Cache-Control": "no-cache"}
        if any(tag.value in (self.etag, "*") for tag in http.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, headers={**headers, "Content-Type": self.content_type})


def read_files() -> dict[str, PageFile]:
    """Return the files by their routes."""
    found = {}
    for path in sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES):  # an editor may leave others
        body = path.read_bytes()
        name = path.relative_to(FOLDER).as_posix()
        route = "/" if name == "index.html" else f"/page/{name}"
        found[route] = PageFile(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])
    return found
