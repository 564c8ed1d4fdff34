"""Messages inside one process that lie in memory as they would if they came from another one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from executor.run.in_process import InProcess
from executor.run.transport import Transfer

Look = Callable[[Transfer, Sequence[Tensor]], None]


@contextmanager
def messages_in_order(look: Look | None = None) -> Iterator[None]:
    """Let all messages between stages be packed and unpacked, after `look` saw what is sent."""
    send = InProcess.send

    def pack_and_send(transport: InProcess, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        if look is not None:
            look(transfer, tensors)
        pieces = transfer.form.pack([tensor.detach() for tensor in tensors])
        send(transport, transfer, transfer.form.unpack([piece.clone() for piece in pieces]))

    with mock.patch.object(InProcess, "send", pack_and_send):
        yield
