"""Where a process that trains listens: at the address that was asked for, and at no other."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import warnings

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 4096  # of ranks that connect at the same time, and of strangers that must not fill it


def listener_at(host: str, port: int) -> socket.socket | None:
    """A socket that listens at an address of this machine; None where every address has to do.

    That is so for a name that means the loopback address here, other than localhost: on other machines it may mean
    another one. With a warning it is so for an address that this machine does not have, but is reached by.

    Args:
        host: name or address at which the others will look for this process.
        port: likewise; 0 for any.

    Raises:
        OSError: the name means nothing, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not _is_literal(host) and host != "localhost" and any(_loopback(str(place[0])) for *_, place in found):
        return None
    for family, _, _, _, place in found:
        try:
            return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except OSError as problem:
            if problem.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    warnings.warn(
        f"MASTER_ADDR {host} is no address of this machine, where rank 0 runs, so its store listens on all of them; "
        "start rank 0 where MASTER_ADDR is, or set MASTER_ADDR to an address of this machine",
        stacklevel=2,
    )
    return None


def keep_gloo_inside(host: str) -> None:
    """Let gloo listen at the loopback address where the processes meet there; it would at that of the machine's name.

    Args:
        host: name or address at which the processes meet.
    """
    inside = host == "localhost" or (_is_literal(host) and _loopback(host))
    if inside and sys.platform == "linux":
        os.environ.setdefault(_GLOO_INTERFACE, "lo")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
