"""A server that gives one answer."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def saying(answer):
    """Run a server that sends these bytes to the first request and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join()
