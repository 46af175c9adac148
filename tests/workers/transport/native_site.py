"""A native server in a thread, and its clients: of grpcio, and raw ones."""

import asyncio
import socket
import threading

import grpc
import uvloop

from tests.waiting import wait_until
from tests.workers.transport.echo import application
from tests.workers.transport.helpers import HEADERS, SETTINGS, block, frame
from workers.transport.frames import PREFACE
from workers.transport.native import Server

WAIT = 20.0


class Held:
    """A handler that answers only when its test does so."""

    def __init__(self, stream, all_held):
        self.stream = stream
        self.lost = 0
        self.got = []
        all_held.append(self)

    def message(self, message):
        self.got.append(message)

    def half_closed(self):
        """The answer comes later."""

    def closed(self):
        self.lost += 1


class Site:
    """A server in a separate thread."""

    def __init__(self, ssl_context=None, limits=None, further=0, **options):
        self.held = []
        self.errors = []
        self.abuses = []
        self.listening, *self.further = (socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(1 + further))
        self.port, *self.further_ports = (each.getsockname()[1] for each in (self.listening, *self.further))
        self.loop = uvloop.new_event_loop()
        self.server = Server(self.loop, limits, on_error=self.errors.append, on_abuse=self.abuses.append, **options)
        self.loop.call_soon(self.server.serve, self.listening, self.application, ssl_context, self.further)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def application(self, path, metadata, stream):
        return Held(stream, self.held) if path == "/test/Hold" else application(path, metadata, stream)

    def call(self, function, *args):
        """Calls the function in the loop's thread and returns its result."""

        async def run():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT)

    def until(self, condition):
        wait_until(lambda: self.call(condition))

    def close(self):
        self.call(self.server.abort)
        asyncio.run_coroutine_threadsafe(self.server.closed(), self.loop).result(WAIT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)
        self.loop.close()
        for each in (self.listening, *self.further):
            each.close()
        assert self.errors == []


def mirror(channel):
    return channel.stream_stream("/test/Mirror", _registered_method=False)


def hold(channel):
    return channel.stream_unary("/test/Hold")


def connect(site):
    return grpc.insecure_channel(
        f"127.0.0.1:{site.port}", options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    )


def raw(site, port=0):
    peer = socket.create_connection(("127.0.0.1", port or site.port), WAIT)
    peer.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
    return peer


def busy(site, port=0):
    """A connection with an open stream."""
    peer = raw(site, port)
    peer.sendall(frame(HEADERS, 4, 1, block(path="/test/Hold")))
    return peer


def read_all(peer):
    data = b""
    while chunk := peer.recv(65536):
        data += chunk
    return data
