"""A TCP proxy before a server that something may befall when the client has sent so many pieces of data to it."""
import socket
import threading


class CutLine:
    """address: where clients connect. Every connection is one to `target` behind it."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._left, self._event, self._forward = 0, None, True
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, pieces, event, forward):
        """Calls event() once, when the client sends the piece of that number from now, beginning with 1. forward: that
        piece arrives at the server first."""
        with self._lock:
            self._left, self._event, self._forward = pieces, event, forward

    def disarm(self):
        """Whether the event was still to come."""
        with self._lock:
            waiting, self._event = self._event is not None, None
        return waiting

    def close(self):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source, sink, counted):
        try:
            while data := source.recv(1 << 16):
                event, forward = self._count() if counted else (None, True)
                if forward:
                    sink.sendall(data)
                if event is not None:
                    event()
                if not forward:
                    break
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def _count(self):
        with self._lock:
            if self._event is None:
                return None, True
            self._left -= 1
            if self._left > 0:
                return None, True
            event, self._event = self._event, None
            return event, self._forward
