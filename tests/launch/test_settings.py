import contextlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster import readers
from pdserve.cluster.config import CONFIGS, DecodeConfig, Http, PrefillConfig, RouterConfig, UpConfig, load_config
from pdserve.cluster.settings import Loaded, dump, setting, settings_of
from pdserve.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def load_router(flags=None, environ=None, file=None) -> Loaded[RouterConfig]:
    return load_config(RouterConfig, flags, file, environ or {})


@pytest.mark.parametrize("config_class", CONFIGS.values())
def test_without_flags_variables_and_file_a_config_is_its_defaults(config_class):
    assert load_config(config_class, environ={}).config == config_class()


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path):
    file = write(tmp_path, "[http]\nport = 1\nmax_body_bytes = 4096\nhost = '::1'\n")
    loaded = load_router({"port": "3"}, {"PDSERVE_PORT": "2", "PDSERVE_HOST": "localhost"}, file)
    assert loaded.config.http == Http(host="localhost", port=3, max_body_bytes=4096)
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["host"] == "PDSERVE_HOST"
    assert loaded.sources["max_body_bytes"] == str(file)
    assert loaded.sources["lease_s"] == "default"


def test_an_empty_variable_counts_as_not_set():
    assert load_router(environ={"PDSERVE_PORT": ""}).config.http.port == 8000


def test_variables_of_other_roles_of_the_test_suite_and_of_kubernetes_are_passed_over():
    environ = {
        "PDSERVE_KV_MEMORY": "bad for a node, nothing to a router",
        "PDSERVE_TEST_MODEL": "/models/x",
        "PDSERVE_SERVICE_HOST": "10.0.0.7",
        "PDSERVE_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert load_router(environ=environ).config == RouterConfig()


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "eighty"}, {}, "--port: 'eighty' is not a whole number from 0 to 65535"),
        ({"port": "1_000"}, {}, "--port: '1_000' is not a whole number from 0 to 65535"),
        ({}, {"PDSERVE_PORT": "70000"}, "PDSERVE_PORT: '70000' is not a whole number from 0 to 65535"),
        ({}, {"PDSERVE_PROT": "1"}, "environment: no setting is called PDSERVE_PROT, did you mean PDSERVE_PORT?"),
        ({"heartbeat_s": "nan"}, {}, "--heartbeat-s: 'nan' is not a number of seconds from 0.01 to 60"),
        ({"lease_s": "0.6"}, {}, "lease_s 0.6 is below two beats of heartbeat_s 0.5"),
        ({"served_model_name": "a b"}, {}, "--served-model-name: 'a b' is not a model name"),
    ],
)
def test_a_bad_value_is_refused_naming_source_value_and_limit(flags, environ, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_router(flags, environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[http]\nprot = 1", "unknown key 'http.prot', did you mean http.port?"),
        ("[htp]\nport = 1", "unknown key 'htp', did you mean http?"),
        ("port = 1", "unknown key 'port', did you mean http.port?"),
        ("http = 3", "http: 3 is not a table, write [http] and its keys below"),
        ("[http]\nport = '8000'", "http.port: '8000' is not a whole number from 0 to 65535"),
        ("[http]\nport = true", "http.port: True is not a whole number from 0 to 65535"),
        ("[http]\nport = 8000.0", "http.port: 8000.0 is not a whole number from 0 to 65535"),
        ("[http]\nhost = 7", "http.host: 7 is not a string"),
        ("[control]\nlease_s = 'long'", "control.lease_s: 'long' is not a number of seconds"),
        ("[http\nport = 1", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_naming_file_key_and_value(tmp_path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        load_router(file=file)
    assert str(file) in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--config: cannot read .*: No such file"):
        load_router(file=tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_router(file=tmp_path / "binary.toml")


def test_up_refuses_prefill_nodes_in_mode_both():
    with pytest.raises(ConfigError, match=r"--prefill 2 makes no sense with --role-mode both"):
        load_config(UpConfig, {"prefill": "2", "role_mode": "both"}, environ={})
    assert load_config(UpConfig, {"role_mode": "both"}, environ={}).config.num_prefill == 0
    assert UpConfig().num_prefill == 1


@pytest.mark.parametrize(("role", "config_class"), CONFIGS.items())
def test_a_dump_reads_back_as_the_same_config(tmp_path, role, config_class):
    loaded = load_config(config_class, environ={})
    text = dump(loaded, role)
    assert load_config(config_class, None, write(tmp_path, text), {}).config == loaded.config


def test_a_dump_names_the_source_of_each_value(tmp_path):
    text = dump(load_config(DecodeConfig, {"kv_memory": "1G", "cores": "0,2-3"}, environ={"PDSERVE_ROLE": "both"}), "x")
    assert re.search(r"kv_memory = 1073741824 +# --kv-memory:", text)
    assert re.search(r'role = "both" +# PDSERVE_ROLE:', text)
    assert re.search(r"# max_model_len = +# default:", text)
    assert tomllib.loads(text)["compute"]["cores"] == [0, 2, 3]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_dump(text):
    assert tomllib.loads(f"value = {readers.toml_text(text)}")["value"] == text


@pytest.mark.parametrize("config_class", CONFIGS.values())
def test_names_of_settings_are_unique_within_a_process(config_class):
    names = [item.name for item in settings_of(config_class)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1GiB", 1 << 30),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 KiB", 1536),
        ("0.5T", 1 << 39),
        ("100B", 100),
        (" 7k ", 7168),
    ],
)
def test_a_size_is_bytes_in_powers_of_1024(text, expected):
    assert readers.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "1GB", "1.5", "1 G 2", "1PiB", "٣G", "0x10"])
def test_what_is_no_clear_size_is_refused(text):
    with pytest.raises(ValueError, match="is"):
        readers.parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_shown_size_reads_back(number):
    assert readers.parse_size(readers.show_size(number)) == number


def test_kv_memory_is_a_size_in_every_layer(tmp_path):
    file = write(tmp_path, "[memory]\nkv_memory = '64MiB'")
    assert load_config(PrefillConfig, None, file, {}).config.memory.kv_memory == 64 << 20
    file = write(tmp_path, "[memory]\nkv_memory = 67108864")
    assert load_config(PrefillConfig, None, file, {}).config.memory.kv_memory == 64 << 20
    with pytest.raises(ConfigError, match="out of range"):
        load_config(PrefillConfig, {"kv_memory": "1k"}, environ={})


@pytest.mark.parametrize(("text", "expected"), [("0", (0,)), ("3,0-1", (0, 1, 3)), (" 2 , 4-4 ", (2, 4))])
def test_cores_are_a_list_of_numbers_and_ranges(text, expected):
    assert readers.core_list().from_text(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0,0", "3-1", "-1", "5000"])
def test_a_bad_list_of_cores_is_refused(text):
    with pytest.raises(ValueError, match="is not a list of cores"):
        readers.core_list().from_text(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1.evil.org"])
def test_strangers_are_served_only_with_keys_or_when_that_is_said(host, tmp_path):
    with pytest.raises(ConfigError, match=f"--host {re.escape(host)} can be .* --api-key-file FILE, .*--allow-unauth"):
        load_router({"host": host})
    keys = write(tmp_path, "")
    for allowed in ({"allow_unauthenticated": "on"}, {"api_key_file": str(keys)}):
        assert load_router({"host": host, **allowed}).config.http.host == host


@pytest.mark.parametrize("host", ["", "a host", "127.0.0.1\n"])
def test_what_cannot_be_a_host_is_refused(host):
    with pytest.raises(ConfigError, match=r"--host: .* is no host"):
        load_router({"host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_hosts_of_this_machine_are_allowed(host):
    assert load_router({"host": host}).config.http.host == host


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("listen", "tcp://0.0.0.0:0", "with --advertise tcp://HOST:PORT"),
        ("listen", "tcp://*:5555", "with --advertise tcp://HOST:PORT"),
        ("listen", "tcp://[::]:5555", "with --advertise tcp://HOST:PORT"),
        ("listen", "tcp://10.1.2.3:5555", "give all processes --key-file FILE"),
        ("router", "tcp://10.1.2.3:5757", "give all processes --key-file FILE"),
        ("advertise", "tcp://node.example.org:5757", "give all processes --key-file FILE"),
        ("listen", "5555", "write tcp://HOST:PORT or ipc:///PATH"),
        ("listen", "tcp://127.0.0.1", "write tcp://HOST:PORT"),
        ("listen", "tcp://127.0.0.1:99999", "write tcp://HOST:PORT"),
        ("listen", "udp://127.0.0.1:1", "write tcp://HOST:PORT"),
        ("listen", "tcp://u:p@127.0.0.1:1", "write tcp://HOST:PORT"),
        ("listen", "ipc://relative", "an absolute path"),
        ("listen", "ipc://@abstract", "an absolute path"),
        ("listen", "ipc:///" + "x" * 107, "has a path of 108 bytes; a unix socket allows 107"),
        ("router", "tcp://0.0.0.0:5757", "is no address that can be dialled"),
        ("router", "tcp://127.0.0.1:0", "has port 0"),
        ("advertise", "tcp://0.0.0.0:5757", "is no address that can be dialled"),
    ],
)
def test_a_node_refuses_an_address_that_is_open_or_cannot_be_dialled(name, address, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        load_config(PrefillConfig, {name: address}, environ={})
    assert f"--{name}: {address!r}" in str(refusal.value)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5757", "tcp://10.1.2.3:5757"])
def test_a_router_is_there_for_nodes_of_other_machines_only_with_keys(address, tmp_path):
    with pytest.raises(ConfigError, match=r"--control: .* give all processes --key-file FILE"):
        load_router({"control": address})
    keys = write(tmp_path, "")
    assert load_router({"control": address, "key_file": str(keys)}).config.control.control == address


def test_a_node_goes_beyond_this_machine_with_keys_and_an_address_to_be_dialled_at(tmp_path):
    keys = write(tmp_path, "")
    flags = {"listen": "tcp://0.0.0.0:7001", "router": "tcp://10.0.0.1:5757", "key_file": str(keys)}
    with pytest.raises(ConfigError, match=r"--listen: .* with --advertise"):
        load_config(PrefillConfig, flags, environ={})
    network = load_config(PrefillConfig, flags | {"advertise": "tcp://10.0.0.2:7001"}, environ={}).config.network
    assert network.listen == "tcp://0.0.0.0:7001"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:7", "tcp://localhost:7", "ipc:///run/p.ipc"])
def test_a_node_listens_on_this_machine(address):
    assert load_config(PrefillConfig, {"listen": address}, environ={}).config.network.listen == address


@given(st.text(), st.sampled_from([item for config in CONFIGS.values() for item in settings_of(config)]))
def test_any_text_in_any_setting_is_read_or_refused_with_our_own_error(text, item):
    @dataclass(frozen=True, slots=True)
    class One:
        value: object = setting(None, item.reader, item.description)

    with contextlib.suppress(ConfigError):
        load_config(One, {"value": text}, environ={})


@pytest.mark.parametrize("name", ["model", "key_file"])
def test_the_home_of_nobody_is_refused(name):
    with pytest.raises(ConfigError, match="'~0/x' begins with the home of somebody who has none here"):
        load_config(PrefillConfig, {name: "~0/x"}, environ={})


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_an_example_file_names_every_setting_of_its_role_that_the_help_shows_at_the_default(role):
    file = Path(__file__).parents[2] / "configs" / f"{role}.toml"
    assert load_config(CONFIGS[role], None, file, {}).config == CONFIGS[role]()
    named = re.findall(r"^(?:# )?(\w+) =", file.read_text(), re.MULTILINE)
    assert named == [item.name for item in settings_of(CONFIGS[role]) if not item.is_hidden]
