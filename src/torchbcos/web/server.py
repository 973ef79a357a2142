"""Starting the explorer."""

from __future__ import annotations

import socket
import sys
import webbrowser
from collections.abc import Callable

import uvicorn

from torchbcos.web.app import HERE, create_app
from torchbcos.web.explorer import Explorer

__all__ = ["serve"]

EVERYWHERE = ("0.0.0.0", "::")


def serve(
    explorer: Explorer, host: str, port: int, *, browse: bool, announce: Callable[[str], None]
) -> None:
    """Answer at http://HOST:PORT until interrupted; with `port` 0 at any free one."""
    listening = _listen(host, port)
    found = listening.getsockname()[1]
    shown = "localhost" if host in EVERYWHERE else host
    address = f"http://[{shown}]:{found}" if ":" in shown else f"http://{shown}:{found}"
    hosts = ("*",) if host in EVERYWHERE else (*HERE, host.lower())
    server = uvicorn.Server(uvicorn.Config(create_app(explorer, hosts), log_level="warning"))
    announce(address)
    if browse:
        webbrowser.open(address)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # after it has ended in order
        sys.exit(0)
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # so that who is told the address can ask at once
    except socket.gaierror as error:
        listening.close()
        raise ValueError(f"`--host` (={host!r}) must be an address of this machine.") from error
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"`--port` (={port}) of {host} cannot be used ({reason}): choose another, or 0 for any "
            "that is free."
        ) from error
    return listening
