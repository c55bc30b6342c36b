"""Run a real MongoDB server for a laptop, a test or a demo.

``EmbeddedServer.start(directory)`` starts a mongod on 127.0.0.1, or joins the one that already
runs for that directory. The server stops when its last user has called ``stop()``, has exited or
was killed. ``keeper`` runs the mongod, and describes the files of the directory.
"""

from microqueue.embedded.probe import running
from microqueue.embedded.program import find_mongod
from microqueue.embedded.server import EmbeddedServer, PortTakenError, default_directory

__all__ = ["EmbeddedServer", "PortTakenError", "default_directory", "find_mongod", "running"]
