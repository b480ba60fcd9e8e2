"""Who is let in, and what is told to those who are not."""

from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.router.api_keys import MIN_KEY_CHARS, ApiKeys
from tests.router.door import open_door, says

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"


def write_keys(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("header", [f"Bearer {FIRST}", f"bearer {SECOND}", f"Bearer  {FIRST} "])
def test_every_key_of_the_file_lets_in(tmp_path: Path, header: str):
    keys = ApiKeys.read(write_keys(tmp_path, f"# ours\n{FIRST}\n\n  {SECOND}\n"))
    assert keys.allow(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        FIRST,
        f"Basic {FIRST}",
        f"Bearer {FIRST}x",
        f"Bearer {FIRST[:-1]}",
        "Bearer # ours",
    ],
)
def test_anything_else_does_not(tmp_path: Path, header: str | None):
    keys = ApiKeys.read(write_keys(tmp_path, f"# ours\n{FIRST}\n"))
    assert not keys.allow(header)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int):
    with pytest.raises(ConfigError, match=f"others than its owner may use it .mode {mode:04o}.: chmod 600"):
        ApiKeys.read(write_keys(tmp_path, FIRST, mode))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys.read(write_keys(tmp_path, text))


@pytest.mark.parametrize("key", ["x" * (MIN_KEY_CHARS - 1), "two words are no key at all", "schlüssel-0123456789"])
def test_a_bad_key_is_refused_by_its_line_and_never_shown(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match="the key in line 2 is shorter") as caught:
        ApiKeys.read(write_keys(tmp_path, f"{FIRST}\n{key}\n"))
    assert key not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ApiKeys.read(tmp_path / "none")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/tokenize", "/nothing/here"])
async def test_without_a_key_nothing_but_health_is_answered(text, path):
    async with open_door(says(text, "ok"), text, keys=ApiKeys([FIRST])) as door:
        refused = await door.get(path)
        assert refused.status == 401
        assert refused.json["error"]["code"] == "invalid_api_key"
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert refused.headers["X-Request-Id"]
        assert (await door.get("/health")).status == 200
        assert (await door.get("/ready")).status == 200


async def test_with_a_key_everything_is(text):
    allowed = {"Authorization": f"Bearer {FIRST}"}
    async with open_door(says(text, "ok"), text, keys=ApiKeys([FIRST])) as door:
        assert (await door.send("GET", "/v1/models", headers=allowed)).status == 200
        assert (await door.send("GET", "/metrics", headers=allowed)).status == 200
        assert (await door.complete("hello")).status == 401
