"""What the scripts of this folder share: find a data set on disk or on the hub, read its files, write tables."""

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq


def locate(source: str, *patterns: str, flag: str = "--source") -> Path:
    """The file or folder `source`, or the folder that the hub's data set `source` was downloaded to.

    Args:
        patterns: of the files to download.
        flag: names the source in the error.

    Raises:
        FileNotFoundError: neither on disk nor of the form owner/name.
    """
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise FileNotFoundError(f"{flag} {source}: no such file or folder; give one, or a data set id (owner/name)")
    return Path(huggingface_hub.snapshot_download(source, repo_type="dataset", allow_patterns=list(patterns)))


def read(*files: Path) -> list[dict[str, Any]]:
    """The rows of files, one after the other: parquet, jsonl or gzipped jsonl."""
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return pq.ParquetFile(file, page_checksum_verification=True).read().to_pylist()
    data = file.read_bytes()
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def write(folder: Path, tables: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Write <folder>/<name>.parquet for each table, and print its size and sha256. Returns the number of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", write_page_checksum=True)
        print(f"{path}: {len(rows)} rows, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return {name: len(rows) for name, rows in tables.items()}
