"""A TCP proxy on loopback that a test can make bad: stall, delay, cut, or stop within a frame.

Knows bytes only. Faults apply to both directions, from the moment they are set.
"""

import asyncio
import contextlib
import threading


class Proxy:
    """Forwards one port to another, on its own thread from `start` to `stop`.

    target_port may be changed: connections made from then on go there.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.delay_s = 0.0
        self.num_connections = 0
        self._half = False
        self._flowing = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Proxy":
        self._thread.start()
        self._on_loop(self._listen())
        return self

    def stop(self) -> None:
        self._on_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def stall(self) -> None:
        """Hold every byte back until `flow`."""
        self._on_loop(self._set_flowing(False))

    def flow(self) -> None:
        """Let held bytes go on."""
        self._on_loop(self._set_flowing(True))

    def cut(self) -> None:
        """Reset all connections; new ones are taken."""
        self._on_loop(self._cut())

    def cut_within_next_frame(self) -> None:
        """Forward half of what comes next, then reset all connections."""
        self._half = True

    def _on_loop(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._may_flow = asyncio.Event()
        self._may_flow.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._may_flow.set()
        else:
            self._may_flow.clear()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        self._may_flow.set()
        self._server.close()
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._track(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            self._drop(writer)
            return
        self._track(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink, writer, far_writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _track(self, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)

    def _drop(self, *writers: asyncio.StreamWriter) -> None:
        for writer in writers:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *ends: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._may_flow.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self._half and len(data) > 20:
                    self._half = False
                    sink.write(data[: len(data) // 2])
                    await sink.drain()
                    break
                sink.write(data)
                await sink.drain()
        self._drop(*ends)
