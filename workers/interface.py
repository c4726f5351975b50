"""Which network interface holds this node's address."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def local_address(host: str, port: int) -> str:
    """The address this node would call `host` from. Sends nothing. Raises OSError if there is no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the interface that holds an address; None if none is known to."""
    if address.startswith("127.") or address == "::1":
        return _loopback()
    packed6 = socket.inet_pton(socket.AF_INET6, address).hex() if ":" in address else ""
    if packed6:
        with open("/proc/net/if_inet6") as table:
            return next((row.split()[-1] for row in table if row.startswith(packed6)), None)
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == address), None)


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if (_ipv4_of(name) or "").startswith("127.")), None)


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
