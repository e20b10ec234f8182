"""What answers at the addresses of a Jupyter kernel that far memory has ended.

It speaks the part of Jupyter's messaging protocol (5.3) that a front end needs to show an error in each cell, to
restart the kernel and to shut it down. It runs without far memory, in the process of the supervisor.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Optional

import zmq
from jupyter_client.session import Session

#: How long clients may take to connect again, and how long after the first one others are waited for. Sockets of
#: ZeroMQ try every tenth of a second.
_CLIENTS_WITHIN = 5.0
_OTHERS_WITHIN = 0.5


def stand_in(connection_file: str, running: "Optional[dict[str, Any]]", reason: str, advice: str) -> bool:
    """Answers `running`, if a cell was, with `reason`, and all further cells with `advice`, too.

    It returns when the user shuts the kernel down. It returns False at once if there is nobody whom it could answer.
    """
    try:
        with open(connection_file) as file:
            connection: dict[str, Any] = json.load(file)
        with zmq.Context() as context:
            context.linger = 1000
            kernel = _StandIn(context, connection, f"{reason}\n{advice}")
            try:
                return kernel.serve(running, reason)
            finally:
                kernel.close()
    except (OSError, ValueError, KeyError) as error:
        print(f"farfield: the notebook could not be told why its kernel ended: {error!r}", file=sys.stderr)
        return False


def _error(reason: str) -> "dict[str, Any]":
    name = "FarMemoryLost"
    return {"ename": name, "evalue": reason, "traceback": [f"\x1b[31m{name}\x1b[0m: {reason}"]}


class _StandIn:
    def __init__(self, context: Any, connection: "dict[str, Any]", text: str) -> None:
        self._session: Any = Session(
            key=connection["key"].encode(), signature_scheme=connection["signature_scheme"], session="farfield"
        )
        self._text = text
        self._count = 0
        self._sockets: list[Any] = []
        kinds = (("iopub", zmq.XPUB), ("shell", zmq.ROUTER), ("control", zmq.ROUTER), ("hb", zmq.REP))
        for channel, kind in kinds:
            socket = context.socket(kind)
            self._sockets.append(socket)
            if connection.get("curve_secretkey"):
                socket.curve_server = True
                socket.curve_secretkey = connection["curve_secretkey"].encode()
                socket.curve_publickey = connection["curve_publickey"].encode()
            separator = "-" if connection["transport"] == "ipc" else ":"
            socket.bind(f"{connection['transport']}://{connection['ip']}{separator}{connection[f'{channel}_port']}")
        self._broadcast, self._shell, self._control, self._heart = self._sockets
        # A client that is not connected is an error, and not a message that is dropped.
        self._shell.router_mandatory = self._control.router_mandatory = 1

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def serve(self, running: "Optional[dict[str, Any]]", reason: str) -> bool:
        is_heard = self._is_subscribed(_CLIENTS_WITHIN)
        if running is not None:
            if not is_heard:
                return False
            while self._is_subscribed(_OTHERS_WITHIN):
                pass
            self._count = int(running["count"])
            self._say("error", _error(reason), running["parent"])
            self._say("status", {"execution_state": "idle"}, running["parent"])
            content = {"status": "error", "execution_count": self._count, **_error(reason)}
            ident = [bytes.fromhex(one) for one in running["ident"]]
            until = time.monotonic() + _CLIENTS_WITHIN
            # A client connects its channels one after the other.
            while not self._reply(self._shell, "execute_reply", content, running["parent"], ident):
                if time.monotonic() > until or not ident:
                    break
                self._shell.poll(50)
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is self._broadcast:
                    socket.recv()
                elif socket is self._heart:
                    socket.send(socket.recv())
                elif not self._answer(socket):
                    return True

    def _is_subscribed(self, within: float) -> bool:
        """Waits until a client subscribes to broadcasts. What it would be told before is dropped."""
        if not self._broadcast.poll(within * 1000):
            return False
        self._broadcast.recv()
        return True

    def _answer(self, socket: Any) -> bool:
        """Answers one message. Returns False if it asks for the end."""
        ident, parts = self._session.feed_identities(socket.recv_multipart())
        try:
            request = self._session.deserialize(parts)
        except ValueError:
            return True  # Whoever sent it does not know the key.
        kind: str = request["header"]["msg_type"]
        if not kind.endswith("_request"):
            return True
        self._say("status", {"execution_state": "busy"}, request)
        content: dict[str, Any] = {"status": "ok"}
        if kind == "kernel_info_request":
            language = {"name": "python", "version": sys.version.split()[0], "file_extension": ".py"}
            content |= {"protocol_version": "5.3", "implementation": "farfield", "implementation_version": "1"}
            content |= {"language_info": {**language, "mimetype": "text/x-python"}, "banner": self._text}
        elif kind == "comm_info_request":
            content["comms"] = {}
        elif kind == "is_complete_request":
            content["status"] = "unknown"
        elif kind == "shutdown_request":
            content["restart"] = bool(request["content"].get("restart"))
        elif kind != "interrupt_request":
            content = {"status": "error", **_error(self._text)}
        if kind == "execute_request":
            self._count += 1
            content["execution_count"] = self._count
            if not request["content"].get("silent"):
                self._say("error", _error(self._text), request)
        self._reply(socket, kind.replace("_request", "_reply"), content, request, ident)
        self._say("status", {"execution_state": "idle"}, request)
        return kind != "shutdown_request"

    def _say(self, kind: str, content: "dict[str, Any]", parent: "dict[str, Any]") -> None:
        self._session.send(self._broadcast, kind, content, parent=parent, ident=f"kernel.{kind}".encode())

    def _reply(
        self, socket: Any, kind: str, content: "dict[str, Any]", parent: "dict[str, Any]", ident: "list[bytes]"
    ) -> bool:
        try:
            self._session.send(socket, kind, content, parent=parent, ident=ident)
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
