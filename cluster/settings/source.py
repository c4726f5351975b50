"""Where settings come from: defaults, then a YAML file, then `key=value` words; the last word wins.

Every value remembers its source, for `chunkserve check-config` and for messages.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ConfigError
from cluster.settings.tree import (
    PARSERS,
    SECRET_SETTINGS,
    SECTIONS,
    UNSET_WORDS,
    Device,
    Settings,
    build,
    device_defaults,
    value_of,
)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """A checked tree, and for every setting's full name where its value was written."""

    settings: Settings
    sources: dict[str, str]
    device: Device
    """What the service computes on: `model.device`, where that is auto the device that was found."""

    def lines(self) -> Iterator[str]:
        """The tree as YAML, each value with its source as a comment. Secrets are not shown."""
        section = ""
        for name in PARSERS:
            head, _, leaf = name.partition(".")
            if head != section:
                section = head
                yield f"{section}:"
            value = value_of(self.settings, name)
            yield f"  {f'{leaf}: {_shown(name, value)}':<46} # {self.sources[name]}"


def resolve(
    found: Device,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    tree: Mapping[str, object] | None = None,
) -> ResolvedSettings:
    """Read and check the whole tree. Raises ConfigError naming the setting, the place and the nearest name.

    `found` is this machine's device. `tree` is what a file may hold, already read, by section.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(PARSERS, "default")
    given = list(_from_file(file)) if file is not None else []
    given += _from_tree(tree or {})
    given += [_from_word(word) for word in overrides]
    for name, raw, source in given:
        values[name] = _parse(name, raw, source)
        sources[name] = source
    device = _chosen(values.get("model.device"), found)
    for name, default in device_defaults(device).items():
        if values.get(name) is None:
            values[name] = default
            sources[name] = f"default ({device})" if sources[name] == "default" else f"{sources[name]}: auto ({device})"
    return ResolvedSettings(build(values), sources, device)


def _chosen(kind: str | None, found: Device) -> Device:
    """The kind of device that `model.device` names may be on other machines only: then its memory is not known."""
    return found if kind is None or kind == found.kind else Device("cuda" if kind == "cuda" else "cpu")


def _from_tree(tree: Mapping[str, object]) -> Iterator[tuple[str, object, str]]:
    source = "the settings given"
    for section, leaves in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{source}: {unknown_message(section)}")
        if not isinstance(leaves, Mapping):
            raise ConfigError(f"{source}: {section} must be a mapping of names to values")
        for leaf, value in leaves.items():
            yield f"{section}.{leaf}", value, source


def _from_file(path: Path) -> Iterator[tuple[str, object, str]]:
    """Each setting of a YAML file as (full name, raw value, "file:line")."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return
        for section, node in _entries(root, str(path), "the file"):
            place = f"{path}:{node.start_mark.line + 1}"
            if section not in SECTIONS:
                raise ConfigError(f"{place}: {unknown_message(section)}")
            if isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~"):
                continue  # a section whose every line is a comment
            for leaf, value in _entries(node, str(path), section):
                yield f"{section}.{leaf}", loader.construct_object(value, deep=True), f"{path}:{_line(value)}"
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _entries(node: yaml.Node, path: str, what: str) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{_line(node)}: {what} must be a mapping of names to values")
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise ConfigError(f"{path}:{_line(key)}: {name!r} is given twice in {what}")
        seen.add(name)
        yield name, value


def _from_word(word: str) -> tuple[str, object, str]:
    name, equals, raw = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} is not of the form key=value")
    name = name.strip()
    if name in PARSERS and _takes_text(name):
        return name, raw, "command line"
    try:
        return name, yaml.safe_load(raw), "command line"
    except yaml.YAMLError:
        return name, raw, "command line"


def _takes_text(name: str) -> bool:
    """Whether any text is a value: then the command line is taken literally (`model.name=1e5`)."""
    try:
        PARSERS[name]("x y")
    except ValueError:
        return False
    return True


def _parse(name: str, raw: object, source: str) -> Any:
    if name not in PARSERS:
        raise ConfigError(f"{source}: {unknown_message(name)}")
    try:
        return PARSERS[name](raw)
    except ValueError as error:
        shown = "" if name in SECRET_SETTINGS else f" is {raw!r}; it"
        raise ConfigError(f"{source}: {name}{shown} {error}") from None


def unknown_message(name: str) -> str:
    """ "unknown setting 'x'" and the nearest one: by its last word first, then by the whole name."""
    if name in SECTIONS:
        members = ", ".join(known for known in PARSERS if known.startswith(f"{name}."))
        return f"{name!r} is a section, not a setting; its settings are {members}"
    leaf = name.rpartition(".")[2]
    same_leaf = [known for known in (*PARSERS, *SECTIONS) if known.rpartition(".")[2] == leaf]
    by_leaf = difflib.get_close_matches(leaf, [known.partition(".")[2] for known in PARSERS], n=1)
    near = (
        same_leaf
        or difflib.get_close_matches(name, [*PARSERS, *SECTIONS], n=1)
        or [known for known in PARSERS if by_leaf and known.partition(".")[2] == by_leaf[0]]
    )
    hint = f"; did you mean {near[0]!r}?" if near else f"; settings are {', '.join(f'{s}.*' for s in SECTIONS)}"
    return f"unknown setting {name!r}{hint}"


def _shown(name: str, value: object) -> str:
    if value is None:
        return UNSET_WORDS[name]
    if name in SECRET_SETTINGS:
        return "(set)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) else yaml.safe_dump(value).partition("\n")[0]
