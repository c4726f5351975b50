"""API keys from a file: which lines are keys, what changes them, and that no state of the file opens the service."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from api_errors import check_error
from api_fakes import FakeEngineClient, http_client, make_app

from cluster.errors import ConfigError
from cluster.frontend.api_keys import ApiKeys, read_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# the web site\nfirst\n\n  second \n")
    return path


def accepted(keys: ApiKeys, *names: str) -> list[str]:
    return [name for name in names if keys.accept(f"Bearer {name}")]


def test_one_key_a_line(file: Path) -> None:
    assert read_keys(file) == ["first", "second"]
    keys = ApiKeys("alone", file)
    assert accepted(keys, "first", "second", "alone", "third", "# the web site", "") == ["first", "second", "alone"]
    assert not keys.accept("")


def test_without_keys_everybody_may_ask() -> None:
    assert ApiKeys(None, None).accept("")


def test_a_changed_file_holds_at_once(file: Path) -> None:
    keys = ApiKeys(None, file)
    replaced = file.with_name("new")
    replaced.write_text("third\n")
    os.replace(replaced, file)
    assert accepted(keys, "first", "third") == ["third"]


@pytest.mark.parametrize("damage", [lambda path: path.write_text("#\n"), lambda path: path.unlink()])
def test_a_file_that_loses_its_keys_opens_nothing(file: Path, damage: Callable[[Path], object]) -> None:
    keys = ApiKeys(None, file)
    damage(file)
    assert accepted(keys, "first", "x") == ["first"]
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys(None, file)


async def test_requests_need_one_of_the_keys(file: Path) -> None:
    async with http_client(make_app(FakeEngineClient(), api_key_file=str(file))) as http:
        for key in ("first", "second"):
            assert (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        check_error(await http.get("/v1/models"), 401)
        assert (await http.get("/health")).status_code == 200
