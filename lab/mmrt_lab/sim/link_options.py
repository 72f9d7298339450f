"""The options of the link between simulated devices, of ``mmrt bench sim`` and ``mmrt plan``."""

import argparse
from typing import get_args

from mmrt.bench.serve.load_options import number, refuse_options
from mmrt.models.architecture import TransferDType

from .links import Link

_MORE = ("link_latency", "link_packing", "link_recompute")


def add_link(parser: argparse.ArgumentParser, default: float | None, without: str) -> None:
    """Add them. ``default``: GB/s; ``without``: what holds where none is given."""
    add = parser.add_argument
    add("--link", type=number("GB/s", float, above=0), default=default, metavar="GB/S", help=f"between devices ({without})")
    add("--link-latency", type=number("seconds", float, least=0), default=0.0, metavar="S", help="of each transfer (%(default)s)")
    add(
        "--link-packing",
        choices=get_args(TransferDType),
        default="auto",
        help="of KV pages on the link, as memory.kv_transfer_dtype, where that is faster (%(default)s)",
    )
    add("--link-recompute", action="store_true", help="decode's device computes the first layers itself, where that is faster")


def link_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Link | None:
    """Return the link; None without ``--link``. Exits with status 2 for options of a link that there is not."""
    if given.link is None:
        refuse_options(parser, given, _MORE, "there is no --link")
        return None
    return Link(
        bytes_per_s=given.link * 1e9,
        latency_s=given.link_latency,
        packing=given.link_packing,
        recomputes=given.link_recompute,
    )
