"""The rules of ``[media.fetch]``: which URLs may be fetched, and which addresses may be connected to.

Pure. One parser, yarl's, reads a URL for these checks and for the connection (CVE-2026-24779). The gateway checks a request's URLs,
the fetch process checks them again, with each redirect's and each address.
"""

import ipaddress
import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from yarl import URL

from ....runtime.config.fetch import FetchSection
from .fields import show

MAX_URL_CHARS = 4096
_FILE_URL = re.compile(r"file://(localhost)?(?P<path>/[^?#]+)", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # 127.1, 0x7f.1, 2130706433: addresses for some resolvers
# Where machines of clouds learn secrets: AWS (also of containers), Google, Alibaba, Azure, Oracle. In no network that is allowed.
METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254")
        + ("100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
_6TO4_START = 2  # byte of the IPv4 address
_NAT64_STARTS = (4, 5, 6, 7, 8)  # by the prefix's length, without the ninth byte (RFC 6052); Teredo's server is at the first
# IANA's registries of addresses for special purposes, and of IPv6 space. Most of IPv6 is not global: loopback, ULA, link-local,
# multicast, and forms that hold an IPv4 address (mapped, compatible, NAT64). Of the global part Teredo and 6to4 hold one as well.
_SPECIAL_V4 = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24"),
    *("192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
)
_SPECIAL_V6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, (*_SPECIAL_V4, *_SPECIAL_V6)))
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")


class FetchError(ValueError):
    """A URL that is not fetched, or whose answer is not taken. ``status``: for the client."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def check_url(text: str, rules: FetchSection) -> URL:
    """Return the URL if it may be fetched, as far as it alone says. Raises: FetchError (400)."""
    if len(text) > MAX_URL_CHARS:
        raise FetchError(f"has {len(text)} characters, the limit is {MAX_URL_CHARS}", 400)
    check_characters(text)
    try:
        url = URL(text)
        host, port = url.raw_host or "", url.port
    except ValueError:
        raise FetchError(f"is no valid URL: {show(text)}", 400) from None
    if url.scheme not in rules.schemes:
        allowed = ", ".join(rules.schemes)
        raise FetchError(f"has the scheme {show(url.scheme)}, allowed are {allowed} (media.fetch.schemes)", 400)
    if "@" in re.split("[/?#]", text.partition("://")[2])[0]:
        raise FetchError("has a user name or a password, which is not allowed", 400)
    if not _is_host(host):
        raise FetchError(f"has no valid host: {show(host)}", 400)
    if not _is_allowed(host.rstrip("."), rules.allowed_hosts):
        raise FetchError(f"has the host {show(host)}, which is not allowed (media.fetch.allowed_hosts)", 400)
    if port not in rules.ports:
        raise FetchError(f"has the port {port}, allowed are {', '.join(map(str, rules.ports))} (media.fetch.ports)", 400)
    return url


def is_file_url(text: str) -> bool:
    """Return whether it names a file, not a server."""
    return text[:5].lower() == "file:"


def check_file_url(text: str) -> str:
    """Return the path that a ``file:`` URL names. Raises: FetchError (400) for a URL that is none of this machine's files."""
    if len(text) > MAX_URL_CHARS:
        raise FetchError(f"has {len(text)} characters, the limit is {MAX_URL_CHARS}", 400)
    check_characters(text)
    found = _FILE_URL.fullmatch(text)
    if found is None:
        raise FetchError(f"is {show(text)}, expected file:///PATH without query and fragment", 400)
    path = unquote(found["path"])
    if "\0" in path:
        raise FetchError("has a zero byte in its path", 400)
    return path


def check_characters(text: str) -> None:
    """Refuse characters that parsers of URLs read differently. Raises: FetchError (400)."""
    if any(char <= " " or char in "\\\x7f" for char in text):
        raise FetchError("has a space, a control character or a backslash, which a URL must not have", 400)


def may_connect(address: str, networks: Sequence[str]) -> bool:
    """Return whether an address is public, or in one of ``networks``. An address for metadata never may."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 6 and (ip.scope_id is not None or not METADATA.isdisjoint(_held(ip))):
        return False
    if ip in METADATA:
        return False
    if any(ip in ipaddress.ip_network(network) for network in networks):
        return True
    return not any(ip in network for network in _NOT_PUBLIC) and (ip.version == 4 or ip in _GLOBAL_V6)


def _held(ip: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """Yield the IPv4 addresses that a packet to ``ip`` may be sent on to: mapped, compatible, a translator's (NAT64, whose prefix can
    be any of the network's own), a tunnel's (6to4, ISATAP; of Teredo the server, and the client, inverted)."""
    packed = ip.packed
    without_u = packed[:8] + packed[9:]
    for start in _NAT64_STARTS:
        yield ipaddress.IPv4Address(without_u[start : start + 4])
    for place in (packed[_6TO4_START : _6TO4_START + 4], packed[-4:], bytes(byte ^ 0xFF for byte in packed[-4:])):
        yield ipaddress.IPv4Address(place)


def _is_host(host: str) -> bool:
    """Return whether it is a name, or an address in its usual form."""
    try:
        return "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        return _NAME.fullmatch(host) is not None and not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])


def _is_allowed(host: str, patterns: Sequence[str]) -> bool:
    return any(pattern in ("*", host) or (pattern[:2] == "*." and host.endswith(pattern[1:])) for pattern in patterns)
