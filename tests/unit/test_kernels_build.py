"""Building the kernels: once, whoever asks; with an error that says what is missing."""

import multiprocessing
import os
from pathlib import Path

import pytest

from workers.kernels import build
from workers.kernels.build import LIBRARY, BuildError, ensure_built
from workers.kernels.library import Library


def test_it_is_built_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    library = ensure_built(tmp_path)
    written = library.stat().st_mtime_ns
    assert ensure_built(tmp_path) == library
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [library.parent.name]
    assert [path.name for path in library.parent.iterdir()] == [LIBRARY]


def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> None:
    """Of one function that returns a number."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "one.cpp").write_text(f'extern "C" int one() {{ return {number}; }}\n')
    monkeypatch.setattr(build, "SOURCE", source)


def test_libraries_that_were_used_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    built = []
    for number in range(build.KEPT):
        small_source(tmp_path, monkeypatch, number)
        built.append(ensure_built(cache))
        os.utime(built[-1].parent, (number, number))  # used in this order, long ago
    small_source(tmp_path, monkeypatch, 0)
    assert ensure_built(cache) == built[0]  # used again, and nothing is removed
    assert all(path.is_file() for path in built)
    small_source(tmp_path, monkeypatch, build.KEPT)
    newest = ensure_built(cache)
    assert {path.name for path in cache.iterdir()} == {path.parent.name for path in (built[0], *built[2:], newest)}


def test_what_a_killed_build_left_is_removed_and_what_is_being_built_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_source(tmp_path, monkeypatch)
    left, under_way = tmp_path / "cache" / "building-left", tmp_path / "cache" / "building-now"
    for folder in (left, under_way):
        folder.mkdir(parents=True)
    os.utime(left, (1, 1))
    ensure_built(tmp_path / "cache")
    assert not left.exists()
    assert under_way.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_library_that_is_cut_off_is_built_again(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_source(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = ensure_built()
    whole = path.stat().st_size
    os.truncate(path, int(share * whole))
    assert Library().function("one")() == 1
    assert path.stat().st_size == whole


def test_a_library_of_other_bytes_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_source(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = ensure_built()
    path.write_bytes(bytes(1000) + build._END)
    assert Library().function("one")() == 1
    assert "compiling the kernels again, for they cannot be loaded" in caplog.text


def test_what_cannot_be_loaded_is_built_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_source(tmp_path, monkeypatch)
    (tmp_path / "source" / "one.cpp").write_text('int missing();\nextern "C" int one() { return missing(); }\n')
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Wl,-z,now"))  # loading finds what is missing
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="missing"):
        Library()
    assert caplog.text.count("compiling the kernels again") == 1


def test_processes_that_build_at_once_share_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map_async(ensure_built, [tmp_path] * 3).get(timeout=200)
    assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_source(tmp_path, monkeypatch, 1)
    first = ensure_built(tmp_path / "cache")
    small_source(tmp_path, monkeypatch, 2)
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
