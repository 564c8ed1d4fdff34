"""A link of a given rate and delay between two network namespaces.

Two TUN devices, and a process that passes packets on; the kernel's own `netem` would do it, but is not in every kernel.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_PACKET_BYTES = 65536


def pass_on(spaces: list[str], addresses: list[str], bytes_per_s: float, delay_s: float) -> None:
    """Join two namespaces, say so on standard output, and pass packets on until standard input closes."""
    ends = [
        _tun(f"gpipe{os.getpid()}{side}", space, own) for side, space, own in zip("ab", spaces, addresses, strict=True)
    ]
    print("ready", flush=True)
    free_s = [0.0, 0.0]  # when the link in each direction has sent what it took
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        now = time.monotonic()
        for direction, packets in enumerate(under_way):
            while packets and packets[0][0] <= now:
                os.write(ends[1 - direction], packets.popleft()[1])
        due = min((packets[0][0] for packets in under_way if packets), default=now + 1.0)
        ready, _, _ = select.select([*ends, sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if sys.stdin in ready:
            return
        for direction, end in enumerate(ends):
            if end in ready:
                packet = os.read(end, _PACKET_BYTES)
                free_s[direction] = max(free_s[direction], time.monotonic()) + len(packet) / bytes_per_s
                under_way[direction].append((free_s[direction] + delay_s, packet))


def _tun(name: str, space: str, address: str) -> int:
    """Descriptor of a new device, which lies in a namespace as `cable0`."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH", name[-15:].encode(), _TUN_WITHOUT_HEADER))
    subprocess.run(["ip", "link", "set", name[-15:], "netns", space, "name", "cable0"], check=True)
    subprocess.run(["ip", "-n", space, "address", "add", f"{address}/24", "dev", "cable0"], check=True)
    subprocess.run(["ip", "-n", space, "link", "set", "cable0", "up"], check=True)
    return descriptor


def start(spaces: list[str], addresses: list[str], *, bytes_per_s: float, delay_s: float) -> subprocess.Popen[str]:
    """Join two namespaces by a link; it ends when standard input of the process closes."""
    words = [*spaces, *addresses, repr(bytes_per_s), repr(delay_s)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise OSError("the link could not be made")
    return process


if __name__ == "__main__":
    pass_on(sys.argv[1:3], sys.argv[3:5], float(sys.argv[5]), float(sys.argv[6]))
