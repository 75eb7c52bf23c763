"""Starts real servers on this machine."""

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from layerskip.serving.connections import configured


@contextmanager
def running(app, log=False):
    """Run a real server on a free port in a thread; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # notices slow readers soon
    server = uvicorn.Server(configured(app, log=log))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
