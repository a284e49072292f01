"""Where a spawned engine process begins. Imports the engine inside `main` only: the server must not load it."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from localfast import errors
from localfast.engine import messages
from localfast.engine.home import use


def main(connection: Connection) -> None:
    """First frame in: Load. First frame out: Ready, or Broken with the reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle: it drains, then stops us
    frame = messages.decode_to_engine(connection.recv_bytes())
    assert isinstance(frame, messages.Load)
    try:
        use(frame.config.engine_path)
        from localfast.engine import worker
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or one of its shared libraries is missing
        broken = errors.EngineMissing(reason=str(error))
        connection.send_bytes(messages.encode(messages.Broken(*errors.to_wire(broken))))
        return
    worker.serve(connection, frame.config)
