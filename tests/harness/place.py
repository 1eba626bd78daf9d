"""What checkpoints and data ask of a place in object storage, whatever its service."""

from __future__ import annotations

import io

from megatron.core.files.remote_path import RemotePath


def check_methods(root: RemotePath) -> None:
    """Write, read, list, replace and delete below ``root``, which is empty before and after."""
    file = root / "below" / "b.bin"
    with file.open("wb") as sink:
        sink.write(bytes(range(200)))
    assert file.read_range(0, 100) == bytes(range(100))
    assert file.read_range(150, 300) == bytes(range(150, 200))
    with file.open("rb") as source:
        source.seek(-2, io.SEEK_END)
        assert source.read() == bytes([198, 199])
    (root / "a.txt").write_text("é", encoding="utf-8")
    assert sorted(path.name for path in root.iterdir()) == ["a.txt", "below"]
    assert [str(path) for path in root.glob("*/b.*")] == [str(file)]
    assert root.sizes_below() == {"a.txt": 2}
    assert (file.stat().st_size, file.is_file(), root.is_dir(), (root / "x").exists()) == (200, True, True, False)
    before = file.version()
    file.write_text("other", encoding="utf-8")
    assert (file.version() != before, file.read_text(encoding="utf-8")) == (True, "other")
    root.remove_tree()
    assert list(root.iterdir()) == []
