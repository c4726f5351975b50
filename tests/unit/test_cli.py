"""The command line as a user runs it: exit statuses, messages, and the check that all packages are ours."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster import commands
from cluster.launch.launcher import check_port
from cluster.launch.local_ray import free_ports
from cluster.models.store import StoredModel

ROOT = Path(__file__).resolve().parents[2]


def chunkserve(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    code = "import sys; from cluster.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_check_config_prints_the_tree_with_sources(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server:\n  port: 9000\n")
    done = chunkserve("check-config", "model.name=a", "--config", str(file), "server.num_frontends=2")
    assert done.returncode == 0
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in done.stdout.splitlines()}
    assert lines["port: 9000"] == f"{file}:2"
    assert lines["num_frontends: 2"] == "command line"
    assert lines["name: a"] == "command line"
    assert lines["host: 127.0.0.1"] == "default"


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_a_wrong_setting_is_one_line_and_status_2(command: str) -> None:
    done = chunkserve(command, "server.prt=9")
    assert done.returncode == 2
    assert done.stderr == "chunkserve: command line: unknown setting 'server.prt'; did you mean 'server.port'?\n"
    assert done.stdout == ""


def test_check_config_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from cluster import commands; commands.run(['check-config']);"
        "sys.exit(str(sorted({'ray', 'torch', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["serve", "--prot", "1"], ["model", "fetch", "a/b", "c/d"]])
def test_an_unknown_command_line_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.run(arguments)
    assert caught.value.code == 2


def test_a_model_that_is_nowhere_is_one_line_and_status_1() -> None:
    done = chunkserve("serve", "model.path=/no/such/model", f"server.port={free_ports(1)[0]}")
    assert done.returncode == 1
    expected = "model.path '/no/such/model' is neither a directory here nor a hub id (owner/name)"
    assert done.stderr == f"chunkserve: {expected}\n"


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    code = (
        "import socket, subprocess, sys\n"
        "held = socket.create_server(('127.0.0.1', 0), reuse_port=True)\n"
        "from cluster import commands\n"
        "status = commands.run(['serve', 'model.path=/no/such/model', f'server.port={held.getsockname()[1]}'])\n"
        "assert 'ray' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is in use on 127.0.0.1" in done.stderr


@pytest.mark.parametrize("text", [None, "# no key yet\n"])
def test_a_key_file_without_keys_is_refused_before_anything_is_loaded(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    done = chunkserve("serve", f"server.port={free_ports(1)[0]}", f"server.api_key_file={file}")
    assert done.returncode == 2
    assert f"server.api_key_file {file}" in done.stderr


def test_prepare_finds_the_model_and_compiles_unless_a_gpu_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = StoredModel(tmp_path, "a fake", 0.0)
    monkeypatch.setattr("cluster.launch.node.open_store", lambda say: Mock(resolve=lambda path: model))
    monkeypatch.setattr("cluster.launch.kernel_build.ensure_built", lambda: Path("/kernels.so"))
    assert commands.run(["prepare", "model.device=cpu"]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path) in said
    assert "kernels: /kernels.so" in said
    assert commands.run(["prepare", "model.device=cuda"]) == 0
    assert "kernels" not in capsys.readouterr().out
    monkeypatch.undo()
    assert commands.run(["prepare", "model.path=/no/such/model"]) == 1


def test_a_free_port_passes() -> None:
    check_port("127.0.0.1", free_ports(1)[0])


def test_packages_of_the_same_name_from_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "__init__.py").write_text("")
    # `python -c` puts the working directory first; a script's own directory comes first in the same way.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cluster.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "check-config"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"scheduler from {tmp_path}" in done.stderr
    assert f"cluster from {ROOT}" in done.stderr
