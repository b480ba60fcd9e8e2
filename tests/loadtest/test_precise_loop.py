import asyncio
import socket
import time

from pdserve.loadtest.client.precise_loop import new_precise_loop


def run(coroutine):
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        return runner.run(coroutine)


def test_a_timer_never_fires_early():
    async def wait():
        late = []
        for _ in range(20):
            due = time.monotonic() + 0.0007
            await asyncio.sleep(due - time.monotonic())
            late.append(time.monotonic() - due)
        return late

    # The loop counts what is within the clock's resolution as due.
    assert min(run(wait())) >= -time.get_clock_info("monotonic").resolution


def test_a_socket_is_read_while_a_timer_waits():
    async def wait():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.call_later(3600.0, theirs.close)
            loop.call_later(0.001, theirs.send, b"x")
            return await loop.sock_recv(ours, 1)

    assert run(wait()) == b"x"


def test_another_thread_wakes_the_loop():
    async def wait():
        asyncio.get_running_loop().call_later(3600.0, print)
        return await asyncio.to_thread(str, 7)

    assert run(wait()) == "7"
