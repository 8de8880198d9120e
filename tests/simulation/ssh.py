"""What leads from the launcher to another host: an ssh client, and the server's session there.

Neither is a process of the simulation. The client gives up a host that does not answer, or that has
been silent for as long as its options say. The server, as it comes, asks nobody whether the client
is still there: it learns of its end when something arrives, or when what it sends does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.network import Socket
from tests.simulation.pipes import Reader, Writer, make_pipe

if TYPE_CHECKING:
    from tests.simulation.processes import Host, Process

_ORPHAN_SECONDS = 100.0
"""How long a kernel tries to send what an ended program left behind (tcp_orphan_retries)."""

_UNANSWERED_SECONDS = 924.0
"""How long a kernel sends again what is not acknowledged (tcp_retries2)."""

_INPUT, _END_OF_INPUT, _OUTPUT, _ERRORS, _EXIT = b"I", b"E", b"O", b"R", b"X"


class _Kernel:
    """Owns the sockets of programs that are no processes of the simulation."""

    is_gone = False

    def __init__(self, host: Host) -> None:
        self.host = host
        self.world = host.network.world
        self.descriptors: dict[int, Socket] = {}

    def new_descriptor(self, sock: Socket) -> int:
        return -1

    def __str__(self) -> str:
        return f"ssh on {self.host.name}"


class _Line(Socket):
    """One end of the connection between client and server: messages with a letter for the kind."""

    of_agent = True

    def __init__(
        self, host: Host, take: Callable[[bytes, bytes], None], end: Callable[[str], None]
    ) -> None:
        super().__init__(_Kernel(host))  # type: ignore[arg-type]
        self._take = take
        self._end = end

    def tell(self, kind: bytes, data: bytes = b"") -> None:
        if not self.is_closed:
            self._transmit(kind + data)

    def expire(self) -> None:
        """Forget what could not be delivered."""
        self._outbox.clear()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def _receive(self, data: bytes) -> None:
        super()._receive(data)
        if self.is_closed:
            return
        if self._at_end or self._error is not None:
            self._end("closed by remote host")
            return
        message, self._inbox = self._inbox, b""
        self._take(message[:1], message[1:])


class _Session:
    """What the server does for one client: a program, and pipes to it."""

    def __init__(self, host: Host, client: Host, program: list[str]) -> None:
        self.line = _Line(host, self._take, lambda why: self._close())
        self._world = host.network.world
        self._is_over = False
        ends = [make_pipe(self._world) for _ in range(3)]
        (theirs, self._input), (self._output, out), (self._errors, err) = ends
        for end in (self._input, self._output, self._errors):
            end.references = 1
        environ = {
            "HOME": "/",
            "PATH": "/usr/bin",
            "SSH_CONNECTION": f"{client.address} 40000 {host.address} 22",
        }
        self._process = host.launch(program, environ, None, {0: theirs, 1: out, 2: err})
        self._output.callback = lambda: self._pass_on(self._output, _OUTPUT)
        self._errors.callback = lambda: self._pass_on(self._errors, _ERRORS)
        self._process.when_gone.append(self._finish)
        host.when_lost.append(self._lose_power)

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind == _INPUT:
            self._input.put(data)
        elif not self._is_over:
            self._input.close()

    def _pass_on(self, reader: Reader, kind: bytes) -> None:
        data = reader.take()
        if data and not self._is_over:
            if not self.line.has_unsent:
                self._world.later(_UNANSWERED_SECONDS, self._expect_answer)
            self.line.tell(kind, data)

    def _expect_answer(self) -> None:
        if self.line.has_unsent:
            self._close()

    def _finish(self) -> None:
        if not self._is_over:
            self.line.tell(_EXIT, str(self._process.code).encode())
            self._close()

    def _close(self) -> None:
        """End: the program's input ends, and nobody reads what it writes."""
        if not self._is_over:
            self._is_over = True
            self.line.close()
            for end in (self._input, self._output, self._errors):
                end.callback = None
                end.vanish()

    def _lose_power(self) -> None:
        self._is_over = True
        self.line.vanish()


class SshClient:
    """The command `ssh`, as a child of the launcher."""

    def __init__(self, parent: Process, command: list[str], files: dict[int, Any]) -> None:
        """Take the command's words, and the ends of the pipes that are its descriptors."""
        self.code: int | None = None
        self.when_gone: list[Callable[[], None]] = []
        self._here = parent.host
        network = parent.host.network
        self._world = network.world
        self.pid = network.new_pid()
        options = dict(word.split("=") for word in command if "=" in word and " " not in word)
        self._patience = float(options["ConnectTimeout"])
        self._interval = float(options["ServerAliveInterval"])
        self._most_silent = self._interval * float(options["ServerAliveCountMax"])
        self._host = network.hosts[command[command.index("--") - 1]]
        self._program = shlex.split(command[-1].removeprefix("exec "))
        self._files = files
        self._input: Reader = files[0]
        self._output: Writer = files[1]
        self._errors: Writer = files[2]
        for file in files.values():
            file.references += 1
        self._session: _Session | None = None
        self._line = _Line(self._here, self._take, self._lose)
        self._silent = 0.0
        self._here.when_lost.append(self._lose_power)
        self._world.later(self._world.random.uniform(0.05, 1.0), self._connect)

    @property
    def is_gone(self) -> bool:
        return self.code is not None

    def signal(self, number: int) -> None:
        """Take a signal that ends it."""
        self._end(-number)

    def _is_cut(self) -> bool:
        network, pair = self._here.network, (self._here, self._host)
        ways = (pair, pair[::-1])
        return self._host.is_down or any(network.is_cut(*way, of_agent=True) for way in ways)

    def _connect(self) -> None:
        if self.is_gone:
            return
        if self._is_cut():
            self._patience -= 1.0
            if self._patience > 0:
                self._world.later(1.0, self._connect)
            else:
                self._lose("timed out")
            return
        self._session = _Session(self._host, self._here, self._program)
        theirs = self._session.line
        self._line.peer, theirs.peer = theirs, self._line
        self._input.callback = self._pass_on
        self._pass_on()
        self._world.later(self._interval, self._look)

    def _pass_on(self) -> None:
        """Send what the launcher wrote."""
        data = self._input.take()
        if data:
            self._line.tell(_INPUT, data)
        elif self._input.writer.is_gone:
            self._input.callback = None
            self._line.tell(_END_OF_INPUT)

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind == _OUTPUT:
            self._output.put(data)
        elif kind == _ERRORS:
            self._errors.put(data)
        else:
            code = int(data)
            self._end(code if code >= 0 else 255)

    def _look(self) -> None:
        """Ask whether the server is still there."""
        assert self._session is not None
        if self.is_gone:
            return
        if self._is_cut():
            self._silent += self._interval
        elif self._session.line.is_closed and not self._session.line.has_unsent:
            self._silent = self._most_silent  # the host has started again
        else:
            self._silent = 0.0
        if self._silent >= self._most_silent:
            self._lose("not responding")
        else:
            self._world.later(self._interval, self._look)

    def _lose(self, why: str) -> None:
        self._errors.put(f"ssh: {self._host.name}: {why}\n".encode())
        self._end(255)

    def _lose_power(self) -> None:
        self.code = -9
        self._input.callback = None
        self._line.vanish()

    def _end(self, code: int) -> None:
        if self.is_gone:
            return
        self.code = code
        self._input.callback = None
        self._line.close()
        self._world.later(_ORPHAN_SECONDS, self._line.expire)
        for file in self._files.values():
            file.close()
        for call in self.when_gone:
            call()
