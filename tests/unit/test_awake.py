"""Deadlines hold while the process runs, and while it stands still they wait."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from link_peers import DEADLINE

from cluster.awake import awake_timeout


async def test_it_ends_what_takes_too_long() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.7):
            await asyncio.Event().wait()
    assert 0.6 < time.monotonic() - began < 5


async def test_what_is_quick_goes_on_undisturbed() -> None:
    async with awake_timeout(0.05):
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)  # nothing comes later


async def test_no_time_at_all() -> None:
    with pytest.raises(TimeoutError):
        async with awake_timeout(0):
            await asyncio.Event().wait()


async def test_errors_and_cancellations_from_inside_are_their_own() -> None:
    with pytest.raises(KeyError):
        async with awake_timeout(DEADLINE):
            raise KeyError("x")

    async def wait() -> None:
        async with awake_timeout(DEADLINE):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_pause_does_not_count() -> None:
    answer = asyncio.get_running_loop().create_future()
    async with awake_timeout(0.3):
        await asyncio.sleep(0)
        time.sleep(1.2)  # noqa: ASYNC251 - the process stands still
        asyncio.get_running_loop().call_later(0.1, answer.set_result, 7)  # what others said is read a little later
        assert await answer == 7


async def test_after_a_pause_it_still_ends() -> None:
    async def wait() -> None:
        async with awake_timeout(0.3):
            await asyncio.sleep(0)
            time.sleep(1.2)  # noqa: ASYNC251
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()


async def test_pauses_again_and_again_do_not_make_it_endless() -> None:
    pauses = 0

    async def pause_often() -> None:
        nonlocal pauses
        async with awake_timeout(0.3):
            while True:
                await asyncio.sleep(0)
                time.sleep(0.6)  # noqa: ASYNC251
                pauses += 1
                assert pauses < 10

    with pytest.raises(TimeoutError):
        await pause_often()


STOPPED = """
import asyncio, sys
from cluster.awake import awake_timeout

async def main():
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    async with awake_timeout(1.0):
        print("got", await reader.readline(), flush=True)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_goes_on_waiting() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.2)
        output, _ = child.communicate("hello\n", timeout=DEADLINE)
        assert output == "got b'hello\\n'\n"
    finally:
        child.kill()
        child.wait()
