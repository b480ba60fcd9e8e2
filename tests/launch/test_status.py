"""What `pdserve status` prints, and what it says when there is nothing to print."""

from pathlib import Path

import pytest

from pdserve.launch.cli import main
from pdserve.launch.status import table
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.overview import overview
from pdserve.router.rules import Rules
from tests.in_process import InProcessCluster
from tests.router.test_dispatcher import make_dispatcher


def test_a_line_a_node_with_its_pool_and_its_links():
    cluster = InProcessCluster(num_blocks=64, is_remote=True, bytes_per_s=0.82e9)
    cluster.submit(list(range(40)), max_tokens=50)
    cluster.run(until=lambda: cluster.now > 0.6)
    shown = table(overview(cluster.dispatcher)).splitlines()
    assert shown[0].split() == [
        "node",
        "role",
        "state",
        "KV",
        "used",
        "leased",
        "prefixes",
        "running",
        "waiting",
        "prompt",
        "links",
    ]
    decode, prefill = shown[1], shown[2]
    assert decode.startswith("D0    decode   up     ")
    assert decode.endswith("  P0 zmq 0.8 GB/s")
    assert prefill.startswith("P0    prefill  up     ")
    assert "of 64 blocks" in decode
    assert shown[-1] == "ready, 0 requests queued"


def test_the_blocks_that_a_node_finds_by_hash_are_shown_as_far_as_the_router_knows():
    cluster = InProcessCluster(num_blocks=64)
    cluster.submit(list(range(40)), max_tokens=6)
    cluster.run()
    shown = [node["prefix_blocks"] for node in overview(cluster.dispatcher)["nodes"]]
    assert shown == [0, 0]
    told = cluster.now + 1.0
    cluster.run(until=lambda: cluster.now > told)
    shown = overview(cluster.dispatcher)
    assert [(node["node"], node["prefix_blocks"]) for node in shown["nodes"]] == [("D0", 11), ("P0", 10)]
    assert "11 blocks" in table(shown).splitlines()[1]


def test_a_node_without_a_beat_has_joined_and_no_more_is_known():
    dispatcher = make_dispatcher("P0", decodes=())
    assert table(overview(dispatcher)).splitlines()[1:] == [
        "P0    prefill  joined",
        "",
        "not ready: no decode node has joined, 0 requests queued",
    ]


def test_a_cluster_without_nodes_is_not_ready():
    assert "not ready" in table(overview(Dispatcher(Rules())))


def test_where_no_router_is_the_url_is_named(capsys):
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 2
    assert "--url http://127.0.0.1:1: no router answers there" in capsys.readouterr().err


def test_what_is_no_url_is_refused(capsys):
    assert main(["status", "--url", "127.0.0.1:8000"]) == 2
    assert "must begin with http://" in capsys.readouterr().err


def test_a_key_file_without_a_key_is_refused(tmp_path: Path, capsys):
    path = tmp_path / "keys"
    path.write_text("# none\n")
    path.chmod(0o600)
    assert main(["status", "--api-key-file", str(path)]) == 2
    assert "holds no key" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["status", "keygen"])
def test_help_is_one_screen(word: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
