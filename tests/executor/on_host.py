"""Runs `under_torchrun` in a network namespace, as `ip netns exec` does, in a process that is there already.

python on_host.py NAMESPACE FOLDER
"""

import ctypes
import os
import sys
from pathlib import Path

from tests.executor import under_torchrun

CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h

if __name__ == "__main__":
    namespace = os.open(f"/run/netns/{sys.argv[1]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {sys.argv[1]}")
    os.close(namespace)
    under_torchrun.main(Path(sys.argv[2]))
