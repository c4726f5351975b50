"""Building the kernels: once, whoever asks; with an error that says what is missing."""

import multiprocessing
from pathlib import Path

import pytest

from workers.kernels import build
from workers.kernels.build import LIBRARY, BuildError, ensure_built


def test_it_is_built_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    library = ensure_built(tmp_path)
    written = library.stat().st_mtime_ns
    assert ensure_built(tmp_path) == library
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [library.parent.name]
    assert [path.name for path in library.parent.iterdir()] == [LIBRARY]


def test_processes_that_build_at_once_share_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map_async(ensure_built, [tmp_path] * 3).get(timeout=200)
    assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCE", source)
    first = ensure_built(tmp_path / "cache")
    (source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert ensure_built(tmp_path / "cache") != first


def test_a_compiler_error_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "wrong.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(BuildError, match=r"could not compile the kernels: .*wrong\.cpp"):
        ensure_built(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        ensure_built(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="file"):
        ensure_built(tmp_path / "file" / "cache")


def test_without_a_home_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(no_home))
    with pytest.raises(BuildError, match="home"):
        ensure_built()


def test_what_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    library = ensure_built(tmp_path / "cache")
    library.parent.chmod(0o777)
    with pytest.raises(BuildError, match="another user"):
        ensure_built(tmp_path / "cache")
