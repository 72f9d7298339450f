"""The bus over real sockets: addressing by generation, loss instead of blocking, bad frames, asyncio without stalls."""

import asyncio
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mmrt.runtime.bus import messages, wire
from mmrt.runtime.bus.transport import ActorSocket, ControllerSocket, drain_in_loop, listen_for_controller


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerSocket]:
    socket = ControllerSocket(tmp_path)
    yield socket
    socket.close()


@pytest.fixture
def decode(tmp_path: Path, controller: ControllerSocket) -> Iterator[ActorSocket]:
    socket = ActorSocket(tmp_path, "decode", 7)
    yield socket
    socket.close()


def hello(generation: int = 7) -> messages.Hello:
    return messages.Hello("decode", generation, 1, True)


def send_until_gone(socket: ActorSocket, message: messages.ToController) -> None:
    while not socket.send(message):
        socket.poll(0.01)


def receive_some(socket: ControllerSocket | ActorSocket) -> list[object]:
    received: list[object] = []
    while not received:
        select.select([socket.fd], [], [], 0.05)
        received += socket.receive()
    return received


def test_messages_go_both_ways(controller: ControllerSocket, decode: ActorSocket) -> None:
    send_until_gone(decode, hello())
    assert receive_some(controller) == [("decode", 7, hello())]
    assert controller.send("decode", 7, messages.Welcome(3))
    assert receive_some(decode) == [messages.Welcome(3)]


def test_sending_to_nobody_says_so(controller: ControllerSocket) -> None:
    assert not controller.send("decode", 8, messages.Welcome(1))


def test_an_actor_without_a_controller_does_not_block(tmp_path: Path) -> None:
    socket = ActorSocket(tmp_path, "decode", 1)
    assert not socket.send(hello())
    socket.close()


def test_a_new_controller_is_found_again(tmp_path: Path, decode: ActorSocket, controller: ControllerSocket) -> None:
    send_until_gone(decode, hello())
    receive_some(controller)
    controller.close()
    successor = ControllerSocket(tmp_path)
    received: list[object] = []
    while not received:
        decode.send(hello())
        select.select([successor.fd], [], [], 0.05)
        received += successor.receive()
    assert received[0] == ("decode", 7, hello())
    successor.close()


def test_a_controller_connects_to_one_that_is_confined_and_so_does_its_successor(tmp_path: Path, controller: ControllerSocket) -> None:
    """Each generation makes the socket anew, under its own name on the bus."""
    video: ActorSocket | None = None
    for generation in (1, 2):
        if video is not None:
            video.close()
        video = ActorSocket(tmp_path, "video", generation, listen_for_controller(tmp_path, "video"))
        send_until_gone(video, hello())
        assert receive_some(controller) == [("video", generation, hello())]
        assert controller.send("video", generation, messages.Welcome(3))
        assert receive_some(video) == [messages.Welcome(3)]
    controller.close()
    successor = ControllerSocket(tmp_path)
    received: list[object] = []
    while not received:
        video.send(hello())
        select.select([successor.fd], [], [], 0.05)
        received += successor.receive()
    assert received[0] == ("video", 2, hello())
    assert successor.send("video", 2, messages.Welcome(4))
    assert receive_some(video) == [messages.Welcome(4)]
    successor.close()
    video.close()


def test_a_controller_connects_to_those_of_several_that_it_meets(tmp_path: Path, controller: ControllerSocket) -> None:
    other = ActorSocket(tmp_path, "video.1", 4, listen_for_controller(tmp_path, "video.1"))
    assert not other.send(hello())
    controller.meet(["gateway", "video", "video.1", "decode"])
    send_until_gone(other, hello())
    assert receive_some(controller) == [("video.1", 4, hello())]
    assert controller.send("video.1", 4, messages.Welcome(3)) and receive_some(other) == [messages.Welcome(3)]
    controller.meet(["gateway", "video", "decode"])
    deadline = time.monotonic() + 30
    while controller.send("video.1", 4, messages.Welcome(3)):
        assert time.monotonic() < deadline, "it is still connected"
        time.sleep(0.01)
    other.close()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa5Hello", wire.encode(messages.Welcome(1)), b"\xff" * 100])
def test_bad_frames_are_dropped(tmp_path: Path, controller: ControllerSocket, decode: ActorSocket, frame: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.routing_id = b"video:1"
        raw.connect(f"ipc://{tmp_path / 'bus'}")
        raw.send(frame)
        raw.send(wire.encode(hello()))
        assert receive_some(controller) == [("video", 1, hello())]


def test_held_messages_share_a_transfer_in_their_order(controller: ControllerSocket, decode: ActorSocket) -> None:
    send_until_gone(decode, hello())
    receive_some(controller)
    orders = [messages.Drop(1, row, 1, 1) for row in range(100)]
    for order in orders:
        controller.hold("decode", 7, order)
    controller.hold("decode", 8, orders[0])
    assert controller.flush() == ["decode"] and controller.flush() == []  # there is no generation 8
    received = list[object]()
    while len(received) < 100:
        received += receive_some(decode)
    assert received == orders
    answers = [messages.Dropped(7, row, 1, 1) for row in range(100)]
    assert all([decode.hold(answer) for answer in answers])
    assert not decode.receive() and not controller.receive()
    assert decode.flush()
    received = []
    while len(received) < 100:
        received += receive_some(controller)
    assert received == [("decode", 7, answer) for answer in answers]


def test_what_is_held_says_whether_the_last_has_left(tmp_path: Path) -> None:
    socket = ActorSocket(tmp_path, "decode", 1)
    assert socket.flush() and socket.hold(hello())
    assert not socket.flush() and not socket.hold(hello())
    socket.close()


def test_a_bad_frame_costs_no_other_of_its_transfer(tmp_path: Path, controller: ControllerSocket) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.routing_id = b"video:1"
        raw.connect(f"ipc://{tmp_path / 'bus'}")
        raw.send_multipart([wire.encode(hello()), b"\xc1", wire.encode(hello(2))])
        assert receive_some(controller) == [("video", 1, hello()), ("video", 1, hello(2))]


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"limit is 107"):
        ControllerSocket(tmp_path / ("x" * 120))


def test_asyncio_answers_a_burst_without_a_stall(controller: ControllerSocket, decode: ActorSocket) -> None:
    """Every message that arrives during a send must be handled although its edge was swallowed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        answers = 0

        def on_request(received: tuple[str, int, messages.ToController]) -> None:
            actor, generation, _ = received
            controller.send(actor, generation, messages.Welcome(1))
            server.poke()

        def on_answer(_: messages.ToActor) -> None:
            nonlocal answers
            answers += 1
            if answers == 500:
                done.set_result(None)
            else:
                decode.send(hello())
                client.poke()

        server = drain_in_loop(loop, controller, on_request)
        client = drain_in_loop(loop, decode, on_answer)
        await asyncio.to_thread(send_until_gone, decode, hello())
        client.poke()
        await asyncio.wait_for(done, 20)
        server.close()
        client.close()

    asyncio.run(main())
