"""URLs and addresses that may be fetched, and every form in which a request tries to get at others."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrt.actors.gateway.reading.url_rules import MAX_URL_CHARS, METADATA, FetchError, check_url, may_connect
from mmrt.runtime.config.fetch import FetchSection

RULES = FetchSection(allowed_hosts=("example.com", "*.pictures.org", "192.0.32.7", "2606:2800::1"), schemes=("https", "http"))
ANY = FetchSection(allowed_hosts=("*",), schemes=("https", "http"))


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "HTTPS://EXAMPLE.COM./a.png?x=1#y",
        "http://a.b.pictures.org",
        "http://example.com:443/",
        "http://192.0.32.7/",
        "http://[2606:2800:0::1]/",
        "https://example.com/a@b.png",
    ],
)
def test_urls_that_are_allowed(url: str) -> None:
    assert check_url(url, RULES).raw_host


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///etc/passwd", "scheme"),
        ("ftp://example.com/a", "scheme"),
        ("data:image/png;base64,AA==", "scheme"),
        ("gopher://example.com/", "scheme"),
        ("//example.com/a", "scheme"),
        ("https://other.com/", 'has the host "other.com", which is not allowed (media.fetch.allowed_hosts)'),
        ("https://pictures.org/", "host"),  # not below itself
        ("https://evilpictures.org/", "host"),
        ("https://example.com.evil.org/", "host"),
        ("https://user@example.com/", "user name"),
        ("https://user:pass@example.com/", "user name"),
        ("https://@example.com/", "user name"),
        ("https://example.com@evil.org/", "user name"),
        ("https://example.com:8080/", "has the port 8080, allowed are 80, 443 (media.fetch.ports)"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "no valid URL"),
        ("https://example.com:80:80/", "no valid URL"),
        ("https://evil.org\\@example.com/", "backslash"),  # CVE-2026-24779
        ("https://example.com\\.evil.org/", "backslash"),
        ("https://example.com/a\nHost: b", "control character"),
        (" https://example.com/", "space"),
        ("https://example.com\t/", "control character"),
        ("https://[::1/", "no valid URL"),
        ("https:///a.png", "no valid host"),
        ("https://exa%6dple.com/", "no valid host"),
        ("https://example.com%00.evil.org/", "no valid host"),
        (f"https://example.com/{'a' * MAX_URL_CHARS}", "characters, the limit is 4096"),
    ],
)
def test_urls_that_are_not(url: str, said: str) -> None:
    with pytest.raises(FetchError) as caught:
        check_url(url, RULES)
    assert caught.value.status == 400 and said in caught.value.message


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.1", "127.1", "0177.0.0.1", "127.0.0.1.5", "1.2.3.0x5", "[fe80::1%25eth0]", "0", "[::1.2.3]"],
)
def test_addresses_in_unusual_forms_are_no_hosts(host: str) -> None:
    with pytest.raises(FetchError, match="no valid"):
        check_url(f"http://{host}/", ANY)


def test_no_host_is_allowed_by_default() -> None:
    with pytest.raises(FetchError, match="allowed_hosts"):
        check_url("https://example.com/", FetchSection())
    with pytest.raises(FetchError, match="allowed are https "):
        check_url("http://example.com/", FetchSection(allowed_hosts=("*",)))


NOT_PUBLIC = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),  # private
    *("169.254.1.1", "100.64.0.1", "100.127.255.255", "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "192.88.99.1"),  # multicast, reserved, relays of 6to4
    *("::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd12:3456::1", "ff02::1", "100::1", "2001:db8::1", "3fff::1", "5f00::1"),
    *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "::127.0.0.1", "::8.8.8.8"),  # mapped, translated, compatible
    *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::a00:1"),  # NAT64
    *("2002:7f00:1::1", "2002:a00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:10::1"),  # 6to4, Teredo, ORCHID
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not may_connect(address, ())
    assert not may_connect(address, ("10.9.0.0/16",))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"])
def test_public_addresses(address: str) -> None:
    assert may_connect(address, ())


@pytest.mark.parametrize("address", ["", "localhost", "1.2.3", "fe80::1%eth0", "2606:4700::1111%eth0", "8.8.8.8/32"])
def test_text_that_is_no_address(address: str) -> None:
    assert not may_connect(address, ("0.0.0.0/0", "::/0"))


def test_networks_that_are_allowed() -> None:
    assert may_connect("10.1.2.3", ("10.1.2.0/24",)) and not may_connect("10.1.3.3", ("10.1.2.0/24",))
    assert may_connect("fd00::5", ("fd00::/64",)) and may_connect("::1", ("::1/128",))
    assert not may_connect("::ffff:10.1.2.3", ("10.1.2.0/24",)), "one address has one form"


HIDDEN = {  # RFC 6052's table of places for 64:ff9b::/96 and prefixes of the network's own, and the other forms that hold an address
    "mapped": "::ffff:169.254.169.254", "compatible": "::169.254.169.254", "6to4": "2002:a9fe:a9fe::1", "well-known NAT64":
    "64:ff9b::a9fe:a9fe", "local NAT64": "64:ff9b:1:fffe::a9fe:a9fe", "/32": "2001:db8:a9fe:a9fe::", "/40": "2001:db8:1a9:fea9:fe::",
    "/48": "2001:db8:122:a9fe:a9:fe00::", "/56": "2001:db8:122:3a9:fe:a9fe::", "/64": "2001:db8:122:344:a9:fea9:fe00:0",
    "/96": "2001:db8:122:344::a9fe:a9fe", "Teredo's server": "2001:0:a9fe:a9fe::1", "Teredo's client": "2001:0:1:1:0:0:5601:5601",
    "ISATAP": "fe80::5efe:a9fe:a9fe",
}  # fmt: skip


@pytest.mark.parametrize("form", HIDDEN)
def test_metadata_in_an_ipv6_form_is_in_no_network(form: str) -> None:
    assert not may_connect(HIDDEN[form], ["::/0", "0.0.0.0/0"])


def test_other_addresses_in_ipv6_forms_are_where_a_network_has_them() -> None:
    allowed = ["64:ff9b::/96", "2002::/16", "::ffff:0:0/96"]
    assert all(may_connect(address, allowed) for address in ("64:ff9b::c000:221", "2002:a00:1::1", "::ffff:10.0.0.1"))


def test_metadata_is_in_no_network() -> None:
    assert {"169.254.169.254", "fd00:ec2::254"} <= set(map(str, METADATA))
    for address in METADATA:
        assert not may_connect(str(address), ("0.0.0.0/0", "::/0"))
    assert not may_connect("::ffff:169.254.169.254", ())


@given(st.ip_addresses())
def test_no_address_that_the_standard_library_calls_special(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if may_connect(str(address), ()):
        assert not (address.is_private or address.is_loopback or address.is_link_local or address.is_multicast or address.is_reserved)
