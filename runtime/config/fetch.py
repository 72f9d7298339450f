"""The configuration of media by URL, ``[media.fetch]``. A part of ``runtime_config``."""

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

HostPattern = Annotated[str, Meta(pattern=r"^(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f]*:[0-9a-f:.]+)$")]
Scheme = Annotated[str, Meta(pattern=r"^https?$")]


class FetchSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed_hosts: tuple[HostPattern, ...] = ()  # "*.NAME": all names below NAME; "*": any; none: nothing is fetched
    schemes: tuple[Scheme, ...] = ("https",)
    ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = (80, 443)
    allowed_networks: tuple[str, ...] = ()  # that are not public, and may be connected to all the same: 10.1.2.0/24
    allowed_roots: tuple[Annotated[str, Meta(pattern="^/+[^/]")], ...] = ()  # directories whose files file: URLs may name
    max_items: Annotated[int, Meta(ge=0, le=1024)] = 64  # fetched for one request
    max_request_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 64  # of them together; one has media.max_item_mib
    max_redirects: Annotated[int, Meta(ge=0, le=20)] = 3
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0  # for one, with its redirects

    def __post_init__(self) -> None:
        for network in self.allowed_networks:
            ipaddress.ip_network(network)  # raises ValueError, which names it
