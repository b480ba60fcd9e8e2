"""Who can be talked to over TCP, with which keys, and what a key file may be."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from pdserve.cluster.codec import encode
from pdserve.cluster.endpoint import Endpoint
from pdserve.cluster.keys import ClusterKeys, key_file_text
from pdserve.cluster.messages import Cancel
from pdserve.cluster.port import make_key_pair
from pdserve.cluster.private_file import write_private
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NO_EPOCH, Epoch, RequestId
from pdserve.launch.cli import main

REQUEST = RequestId(bytes(16))
WAIT_S = 10.0
TCP = "tcp://127.0.0.1:0"


def make_keys(*further: bytes, server: bytes | None = None) -> ClusterKeys:
    public, secret = make_key_pair()
    return ClusterKeys(public, secret, server or public, frozenset([public, *further]))


@asynccontextmanager
async def endpoint(keys: ClusterKeys | None):
    """An endpoint and what it says."""
    said: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
    made = Endpoint(
        Epoch.new(),
        lambda link, envelope: said.put_nowait(("message", envelope.message)),
        lambda link: said.put_nowait(("lost", link)),
        lambda link: said.put_nowait(("writable", link)),
        keys,
    )
    try:
        yield made, said
    finally:
        await made.close()


async def reaches(server_keys: ClusterKeys | None, client_keys: ClusterKeys | None, caplog) -> bool:
    """Whether a message gets through, or else the server says that somebody was not let in."""
    async with endpoint(server_keys) as (server, heard), endpoint(client_keys) as (client, said):
        link = client.connect(await server.listen(TCP))
        async with asyncio.timeout(WAIT_S):
            while said.empty():
                if any("no connection on" in record.message for record in caplog.records):
                    return False
                # Both are on this loop: their descriptors are looked at in each turn.
                await asyncio.sleep(0)
            assert said.get_nowait() == ("writable", link)
            assert client.send(link, Cancel(REQUEST, 1), NO_EPOCH)
            return await heard.get() == ("message", Cancel(REQUEST, 1))


async def test_holders_of_the_same_pair_talk(caplog):
    keys = make_keys()
    assert await reaches(keys, keys, caplog)


async def test_a_pair_of_its_own_lets_in_whom_the_other_side_allows(caplog):
    router = make_keys()
    node = make_keys(server=router.public)
    allowing = replace(router, allowed=router.allowed | {node.public})
    assert await reaches(allowing, node, caplog)


async def test_a_stranger_who_knows_only_the_public_key_is_not_let_in(caplog):
    router = make_keys()
    assert not await reaches(router, make_keys(server=router.public), caplog)


async def test_whoever_is_dialled_must_have_the_key_that_is_expected(caplog):
    ours = make_keys()
    impostor = make_keys(ours.public)
    assert not await reaches(impostor, ours, caplog)


async def test_nobody_is_let_in_without_a_key(caplog):
    assert not await reaches(make_keys(), None, caplog)


async def test_a_holder_of_keys_does_not_talk_to_who_has_none(caplog):
    assert not await reaches(None, make_keys(), caplog)


async def test_what_goes_over_the_wire_cannot_be_read():
    keys = make_keys()
    secret = b"a prompt that nobody else may read"
    seen, is_over = bytearray(), asyncio.Event()
    async with endpoint(keys) as (server, heard), endpoint(keys) as (client, said):
        address = await server.listen(TCP)
        host, port = address.removeprefix("tcp://").split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
            is_over.set()

        tap = await asyncio.start_server(relay, "127.0.0.1", 0)
        link = client.connect(f"tcp://127.0.0.1:{tap.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(WAIT_S):
            assert await said.get() == ("writable", link)
            message = Cancel(RequestId(secret[:16]), 7)
            assert client.send(link, message, NO_EPOCH)
            assert await heard.get() == ("message", message)
            client.close_link(link)
            await is_over.wait()
            tap.close()
            await tap.wait_closed()
    assert len(seen) > 200
    assert secret[:16] not in seen
    assert secret[:16] in encode(message, NO_EPOCH, NO_EPOCH)


def test_a_key_file_is_read_back_as_it_was_written(tmp_path: Path):
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    keys = ClusterKeys.read(path)
    assert keys.allowed == {keys.public}
    assert zmq.curve_public(keys.secret) == keys.public
    assert keys.secret.decode() not in repr(keys)


def test_keys_are_never_overwritten(tmp_path: Path, capsys):
    path = tmp_path / "cluster.key"
    path.write_text("precious")
    assert main(["keygen", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert path.read_text() == "precious"


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "cluster.key"
    write_private(path, key_file_text(*make_key_pair()))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others than its owner may use it .mode 0644.: chmod 600"):
        ClusterKeys.read(path)


@pytest.mark.parametrize("text", ["", "\n", 'public = ""\nsecret = ""\n'], ids=["nothing", "a line", "empty keys"])
def test_a_key_file_without_keys_is_no_way_to_do_without(tmp_path: Path, text: str):
    path = tmp_path / "cluster.key"
    write_private(path, text)
    with pytest.raises(ConfigError, match="public is no key"):
        ClusterKeys.read(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('public = "', 'public = "x', "public is no key"),
        ('secret = "', 'secret = 7 #"', "secret is no key"),
        ("allow = []", 'allow = ["short"]', "entry 1 of allow is no key"),
        ("allow = []", "allow = 3", "allow is no list"),
        ("allow = []", "alow = []", "unknown entry 'alow'"),
        ("allow = []", "server = 1", "server is no key"),
        ("allow = []", "allow = [", "is not what `pdserve keygen` writes"),
    ],
)
def test_a_key_file_that_makes_no_sense_is_refused_without_showing_a_key(tmp_path: Path, old, new, message):
    public, secret = make_key_pair()
    path = tmp_path / "cluster.key"
    write_private(path, key_file_text(public, secret).replace(old, new))
    with pytest.raises(ConfigError) as caught:
        ClusterKeys.read(path)
    assert message in str(caught.value)
    assert secret.decode() not in str(caught.value)
