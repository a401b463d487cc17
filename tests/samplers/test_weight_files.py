"""Weights in files or in memory are read as they were written, and what is not needed any more is gone."""

import resource

import pytest
import torch

from extras.samplers.weight_files import WeightWriter, read_weights


def test_weights_that_find_no_room_leave_nothing_behind(tmp_path):
    """The limit on the size of a file stands in for a full disk: both fail in the middle of a file."""
    writer = WeightWriter(str(tmp_path / "weights"), tmp_path / "run")
    first = writer.write(1, [("a", torch.ones(1000))])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 10_000, 500_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                writer.write(2, [("a", torch.ones(200_000)), ("b", torch.ones(3))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [str(x) for x in tmp_path.rglob("weights_*")] == [first["path"]]
        assert all(torch.equal(x, torch.ones(1000)) for _, x in read_weights(first))
    with pytest.raises(KeyError):  # of whoever makes the tensors
        writer.write(2, (("a", {}[x]) for x in "a"))
    assert [str(x) for x in tmp_path.rglob("weights_*")] == [first["path"]]
    second = writer.write(2, [("a", torch.zeros(200_000))])
    assert [str(x) for x in tmp_path.rglob("weights_*")] == [second["path"]]
    writer.close()
    assert not list(tmp_path.rglob("weights_*"))


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/nothing/here", "/dev/null", 256 * "n", "/sys/weights"])
def test_a_folder_for_weights_that_cannot_be_written_is_refused_when_it_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--weights-dir .* cannot be written: .*; choose another one"):
        WeightWriter(str(tmp_path / name), tmp_path / "run")


@pytest.mark.parametrize("in_memory", [True, False])
def test_weights_are_read_as_they_were_written_until_newer_ones_replace_them(tmp_path, in_memory):
    def weights(version):
        yield "a", torch.full((3, 5), float(version)).bfloat16().t()
        yield "empty", torch.empty(0, 4)
        yield "b", torch.arange(version, version + 7)

    folder = None if in_memory else str(tmp_path / "weights")
    writer = WeightWriter(folder, tmp_path / "run")
    first = writer.write(1, weights(1))
    before = read_weights(first)  # has begun, so it may finish
    second = writer.write(2, weights(2))
    with pytest.raises(FileNotFoundError):
        read_weights(first)
    for about, version in ((before, 1), (read_weights(second), 2)):
        found = list(about)
        assert [name for name, _ in found] == ["a", "empty", "b"]
        for (_, x), (_, y) in zip(found, weights(version), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
    if not in_memory:
        assert len(list(tmp_path.rglob("weights_*"))) == 1
        other = WeightWriter(folder, tmp_path / "other" / "run")
        other.write(1, weights(1))
        WeightWriter(folder, tmp_path / "run")  # the first one was killed, and goes on
        assert len(list(tmp_path.rglob("weights_*"))) == 1
        other.close()
        assert list(tmp_path.rglob("weights_*")) == []
    with pytest.raises(FileNotFoundError):
        read_weights(second) if not in_memory else (writer.close(), read_weights(second))
