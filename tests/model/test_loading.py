"""Every rank reads what it keeps of a model's files, in their precision, and holds no whole model besides."""

import json
from dataclasses import replace
from pathlib import Path

import helpers_families as families
import launch
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from extras.lora import adapters
from rl.model import load as models
from rl.model.checks import check_model, digest_of_files
from rl.model.sharding import rows_of_rank

RANKS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of one mixture with 6 experts, whose files hold each expert by itself, in float32 and in bfloat16."""
    root = tmp_path_factory.mktemp("loading")
    in_float32 = families.save("experts", root / "float32")
    AutoModelForCausalLM.from_pretrained(in_float32, dtype=torch.bfloat16).save_pretrained(root / "bfloat16")
    return in_float32, str(root / "bfloat16")


def weights_in(folder, dtype):
    """A model's parameters as transformers alone reads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: x.detach() for name, x in model.named_parameters()}


def is_mapped_from(x, folder):
    """Whether the memory of a tensor is that of a mapped file in the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= x.data_ptr() < end:
            return path.startswith(str(folder))
    return False


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 8, 80])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_rows_of_a_rank_are_those_that_fsdp2_gives_it(rows, size):
    x = torch.arange(3 * rows).view(rows, 3)
    parts = [*x.chunk(size), *[x[:0]] * size][:size]  # what FSDP2 does, in `_chunk_with_empty`
    for rank in range(2 * size):  # two copies of the model
        assert torch.equal(rows_of_rank(x, rank, size), parts[rank % size])


def test_weights_are_views_of_the_files_unless_they_are_put_together(folders, world):
    model = models.load_pretrained(folders[1], world, dtype=None)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    mapped = {name for name, x in model.named_parameters() if is_mapped_from(x, folders[1])}
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert len(experts) == 4 and len(mapped) > 15
    assert mapped == {name for name, _ in model.named_parameters()} - experts


@pytest.mark.parametrize(("which", "dtype"), [(1, None), (0, torch.bfloat16), (1, torch.float32)])
def test_a_rank_keeps_its_rows_of_what_is_not_a_view(folders, world, which, dtype):
    expected = weights_in(folders[which], dtype or torch.bfloat16)
    for rank in range(RANKS):
        model = models.load_pretrained(folders[which], replace(world, rank=rank), dtype=dtype, shards=RANKS)
        kept = {name: x.detach() for name, x in model.named_parameters()}
        assert kept.keys() == expected.keys()
        for name, x in kept.items():
            assert x.dtype == expected[name].dtype and x.shape == expected[name].shape
            if is_mapped_from(x, folders[which]):
                assert torch.equal(x, expected[name])
                continue
            only = torch.zeros_like(x)
            rows_of_rank(only, rank, RANKS).copy_(rows_of_rank(expected[name], rank, RANKS))
            assert torch.equal(x, only), name
        made = sum(not is_mapped_from(x, folders[which]) for x in kept.values())
        assert made == (4 if dtype is None else len(kept))


@pytest.fixture(scope="module")
def loaded(folders, tmp_path_factory):
    """What tests/model/workers/loading.py found on each of four ranks, of which the last has no expert."""
    out = tmp_path_factory.mktemp("loaded")
    launch.run_file(launch.TESTS / "model" / "workers" / "loading.py", *folders, out, nproc=RANKS)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("way", ["learning", "copies", "on the host", "frozen"])
def test_every_rank_holds_its_rows_of_the_files(folders, loaded, way):
    expected = weights_in(folders[way != "frozen"], torch.bfloat16)
    size, dtype = 2 if way == "copies" else RANKS, torch.bfloat16 if way == "frozen" else torch.float32
    for rank, found in enumerate(loaded):
        whole, rows, _ = found[way]
        assert whole.keys() == rows.keys() == expected.keys()
        for name, x in expected.items():
            assert whole[name].dtype == rows[name].dtype == dtype
            assert torch.equal(whole[name], x.to(dtype)), name
            assert torch.equal(rows[name], rows_of_rank(x.to(dtype), rank, size)), name


def test_machines_with_other_files_under_one_path_are_refused(folders, loaded):
    """Each rank would read its rows of another model. The last of the four ranks has read other files."""
    fix = "its files differ between machines; give all of them the same ones"
    expected = [f"--model {folders[rank == RANKS - 1]}: {fix}" for rank in range(RANKS)]
    assert [found["refused"] for found in loaded] == expected


def test_a_digest_of_files_sees_any_of_them_and_their_sizes(tmp_path):
    contents = [bytes(10), bytes(9), b"1" + bytes(9), bytes(9) + b"1", bytes(500_000), bytes(499_000) + b"1" * 1000]
    digests = set()
    (tmp_path / "config.json").write_text("{}")
    for content in contents:
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(digest_of_files(str(tmp_path)))
    (tmp_path / "model-2.safetensors").write_bytes(contents[-1])
    digests.add(digest_of_files(str(tmp_path)))
    assert len(digests) == len(contents) + 1


def test_rank_0_hashes_all_of_what_stands_beside_adapters(folders, loaded, world):
    expected = weights_in(folders[0], torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    assert [found["beside adapters"][2] for found in loaded] == [[adapters.hash_of(model)]] + 3 * [[""]]
    for found in loaded:
        whole = {name: x for name, x in found["beside adapters"][0].items() if not adapters.is_adapter(name)}
        assert whole.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in whole.items())


def test_files_of_eight_bits_are_refused_from_their_headers(tiny_model, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(Path(tiny_model, name).read_bytes())
    weights = load_file(Path(tiny_model, "model.safetensors"))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_model(str(tmp_path), longest=64)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"--model .*: {name} has 8 bits or fewer; give a model with weights of 16"):
        check_model(str(tmp_path), longest=64)
