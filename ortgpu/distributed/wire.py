"""Messages between the ranks of a preflight, and between a rank and its child: a length, then JSON.

It is never pickle: data from the network has a known form, or the connection ends.

Rank 0 and a rank prove to each other that they know the key of the job, without sending it. Each sends a random number,
and the other answers with an HMAC over it (RFC 2104). Later messages are neither signed nor encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any, get_args

from ..errors import DistributedError, Fix, FixKind, GPUError, Needs, catalogue, escape_controls, manual

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16  # bytes of one read
# The longest messages, in bytes
FROM_A_STRANGER = 1 << 12  # before the proof
FROM_A_RANK = 1 << 20  # facts and results of a rank are a few thousand
FROM_RANK_0 = 1 << 28  # it passes on what all ranks have reported
RANK_0 = "rank 0"
_DEEPEST = 64  # nested lists and objects: Python reads deeper ones than it can write

Message = dict[str, Any]


class GarbledError(Exception):
    """The received bytes are no message."""


def encode(message: Message) -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


class Decoder:
    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete. Raises GarbledError for bytes that cannot begin a message."""
        self._pending += data
        messages = []
        start = 0
        while len(self._pending) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending, start)
            if length > self.longest:
                raise GarbledError(f"a message of {length} bytes")
            end = start + _LENGTH.size + length
            if len(self._pending) < end:
                break
            messages.append(_parse(bytes(self._pending[start + _LENGTH.size : end])))
            start = end
        del self._pending[:start]
        return messages


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise GarbledError("no JSON object")
    if _nests_deeper(message, _DEEPEST):
        raise GarbledError("it nests too deeply")
    return message


def _nests_deeper(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth == 0 or any(_nests_deeper(item, depth - 1) for item in inner)


class Connection:
    """A connected socket that never blocks: bytes that cannot be sent now wait until it takes more."""

    def __init__(self, connected: socket.socket, longest: int = FROM_A_RANK) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.is_open = True
        self._decoder = Decoder(longest)
        self._unsent = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._hear: Callable[[], object] = lambda: None

    def watch(self, selector: selectors.BaseSelector, hear: Callable[[], object]) -> None:
        """Have ``hear`` called when there is something to receive. A later call replaces it."""
        self._hear = hear
        if self._selector is None:
            self._selector = selector
            selector.register(self.socket, selectors.EVENT_READ, self._serve)
            self._flush()

    def _serve(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._hear()

    def trust(self, longest: int) -> None:
        self._decoder.longest = longest

    def send(self, message: Message | bytes) -> None:
        """Send a message, or one that was encoded for many connections."""
        self._unsent += message if isinstance(message, bytes) else encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and self.is_open:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the next receive() reports it
            self._unsent.clear()
        if self._selector is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self.socket, events, self._serve)

    def receive(self) -> list[Message]:
        """Return messages that have arrived. Close the connection at its end. Raises GarbledError.

        It reads until one message is complete and no further, so that a sender without a pause cannot keep it busy.
        """
        try:
            while data := self.socket.recv(min(_CHUNK, _LENGTH.size + self._decoder.longest)):
                if messages := self._decoder.feed(data):
                    return messages
        except BlockingIOError:
            return []
        except OSError:  # reset by the other side
            pass
        self.close()
        return []

    def close(self) -> None:
        if self._selector is not None:
            self._selector.unregister(self.socket)
            self._selector = None
        self.is_open = False
        self.socket.close()


def shorten(words: object) -> str:
    """Return the words of a stranger, of a length that an error can quote."""
    return escape_controls(str(words))[:200]


def challenge() -> str:
    return secrets.token_hex(16)


def proof(key: str, *said: object) -> str:
    return hmac.new(key.encode(), json.dumps(said, sort_keys=True).encode(), "sha256").hexdigest()


def is_proof(given: object, key: str, *said: object) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, proof(key, *said))


def error_to_message(error: GPUError) -> Message:
    return {**error.as_dict(), "others": [error_to_message(other) for other in error.others]}


def error_from_message(message: Message, sender: str | None = None) -> GPUError:
    """Return the error of another rank or the child. Raises GarbledError if the message describes none.

    Fixes that came over the network are sentences with their ``sender``, and never commands: it may be a
    stranger. None means the own child.
    """
    try:
        cls = catalogue().get(message["code"], DistributedError)
        details = {name: _immutable(value) for name, value in message["details"].items() if name in cls.fields}
        return cls(
            str(message["summary"]),
            evidence=[str(line) for line in message["evidence"]],
            fixes=[_fix_from_message(fix, sender) for fix in message["fixes"]],
            others=[error_from_message(other, sender) for other in message["others"]],
            consequence_of=message["consequence_of"],
            severity=message["severity"],
            **details,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise GarbledError(f"no error: {error!r}") from None


def _fix_from_message(fix: Message, sender: str | None) -> Fix:
    text, kind, needs = fix["text"], fix["kind"], fix["needs"]
    if kind not in get_args(FixKind) or needs not in (None, *get_args(Needs)):
        raise GarbledError(f"no fix: {kind!r}, {needs!r}")
    if sender is None:
        return Fix(text, kind=kind, needs=needs)
    is_judgement = sender == RANK_0 and kind == "manual"  # it quotes the ranks
    return manual(text if is_judgement else f"{sender} says: {text}", needs=needs)


def _immutable(value: object) -> object:
    return tuple(map(_immutable, value)) if isinstance(value, list) else value
