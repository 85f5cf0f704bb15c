"""Programs that stand in for rank 0 of a preflight: they print the port that they listen at."""

from __future__ import annotations

import socket
import sys
import time

from ortgpu.distributed.wire import FROM_A_RANK, Decoder, encode, error_to_message, proof
from ortgpu.environment.ranks import short_name
from ortgpu.errors import GPUError, RendezvousError


def admitted():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    print(port, flush=True)
    connected, _ = listener.accept()
    connected.sendall(encode({"challenge": "x"}))
    (hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
    said = {"in": True, "proof": proof(short_name(str(port)), "rank 0", hello["challenge"])}
    verdict = encode({"verdict": error_to_message(RendezvousError("of another rank", ranks=(2,)))})
    return connected, said, verdict


def false_rank_0() -> None:
    verdict = error_to_message(GPUError("of a stranger"))
    said = {
        "flood": b"\0\0\0\2{}" * 10_000,
        "unproved": encode({"challenge": "x"}) + encode({"verdict": verdict}),
        "early": encode({"verdict": verdict}),
        "letters": encode({"challenge": "x"}) + encode({"in": True, "proof": "\ud800"}),
        "rude": encode({"challenge": "x"}) + encode({"refused": "does not answer as rank 0 does\x1b[2J"}),
        "garbage": encode({"challenge": "x"}),
        "number": encode({"challenge": "x"}),
    }[sys.argv[1]]
    welcome = 10**999 if sys.argv[1] == "number" else "soon"
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connected, _ = listener.accept()
        try:
            if sys.argv[1] in ("garbage", "number"):  # of one who knows the key, which follows from the port
                connected.sendall(said)
                from ortgpu.distributed.wire import FROM_A_RANK, Decoder
                from ortgpu.environment.ranks import short_name

                (hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
                own = proof(short_name(str(listener.getsockname()[1])), "rank 0", hello["challenge"])
                connected.sendall(encode({"in": True, "proof": own}) + encode({"welcome": welcome}))
                connected.recv(1 << 16)
            else:
                while True:
                    connected.sendall(said)
                    if sys.argv[1] != "flood":
                        connected.recv(1)
        except OSError:
            pass


def slow() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connected, _ = listener.accept()
    time.sleep(1)
    connected.sendall(encode({"challenge": "x"}))
    (hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
    connected.sendall(encode({"refused": f"{max(hello['seconds'])} seconds are left"}))


def deciding_at_once() -> None:
    connected, said, verdict = admitted()

    connected.sendall(encode(said) + encode({"welcome": 9.0}) + verdict)
    while connected.recv(1 << 16):
        pass


def deciding_after_the_facts() -> None:
    connected, said, verdict = admitted()

    connected.sendall(encode(said) + encode({"welcome": 30.0}))
    decoder, heard = Decoder(FROM_A_RANK), []
    while not (heard := [message for message in heard if "post" in message]):
        heard = decoder.feed(connected.recv(1 << 16))
    (own,) = (message["value"] for message in heard)
    others = {**own, "facts": {**own["facts"], "rank": 0}}
    connected.sendall(encode({"all": [others, own]}) + verdict)
    while connected.recv(1 << 16):
        pass
