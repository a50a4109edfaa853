"""Small files that are whole or absent, and messages about those that are damaged."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpp.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its name and renames it, so that a kill leaves the old one or the new one."""
    draft = path.with_name(f".{path.name}.writing")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line; as whole as `write_text`."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises UserError where the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; what it belongs to is not whole") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it, or name another folder") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; remove it, or name another folder")
    return found


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects; raises as `read_json`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); remove the folder {path.parent}") from None
    if not isinstance(found, list) or not found:
        raise UserError(f"{path} holds no list of records; remove the folder {path.parent}")
    return found


def slug(name: str) -> str:
    """A name as a folder's."""
    return name.replace(" ", "_").replace("/", "_")


def digest(value: Any) -> str:
    """Twelve digits of a plain value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def fingerprint(path: Path) -> str:
    """Twelve digits of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
