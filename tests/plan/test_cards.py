"""Machines by name: h100x8, 24gbx2, and the GPUs that nvidia-smi lists."""

import os

import pytest

from extras.plan import cards
from extras.plan.cards import KINDS, SOURCES, Machine, machine_of, named


@pytest.mark.parametrize(
    ("text", "name", "gpus", "gib", "host", "hosts"),
    [
        ("h100x8", "H100 80 GB", 8, 79.2, 2048, 1),
        ("H100", "H100 80 GB", 1, 79.2, 256, 1),
        ("h200x16", "H200 141 GB", 16, 139.8, 2048, 2),  # of each host
        ("a100_40gbx4", "A100 40 GB", 4, 39.4, 512, 1),
        ("rtx4090", "RTX 4090 24 GB", 1, 23.5, 64, 1),  # no 4,090 cards called "rt"
        ("rtx4090x2", "RTX 4090 24 GB", 2, 23.5, 128, 1),
        ("24gbx2", "24 GB", 2, 0.98 * 24, 128, 1),
        ("h100-24gbx1", "H100 24 GB", 1, 0.98 * 24, 256, 1),
        ("h100-800gbx1", "H100 800 GB", 1, 79.2, 256, 1),  # an H100 has no more than it has
    ],
)
def test_a_machine_by_name(text, name, gpus, gib, host, hosts):
    machine = named(text)
    assert (machine.card.name, machine.gpus, machine.hosts) == (name, gpus, hosts)
    assert machine.card.gib == pytest.approx(gib) and machine.host_gib == host
    assert named(text, 100.0).host_gib == 100


def test_a_part_of_an_h100_is_as_fast_as_the_whole_and_an_unknown_card_has_no_speed():
    assert named("h100-24gbx1").card.tflops == KINDS["h100"].tflops
    assert named("24gbx1").card.tflops == 0


@pytest.mark.parametrize("text", ["foo", "", "x8", "h100x0", "h100xx", "0gb", "foo-24gb", "h100x99999", "24gb-h100"])
def test_other_names_are_refused_with_the_kinds_that_there_are(text):
    with pytest.raises(ValueError, match=f"--plan {text}: no such machine.*h100x8.*rtx4090"):
        named(text)


def test_every_kind_has_figures_of_its_data_sheet():
    assert SOURCES.keys() == KINDS.keys()
    for kind, card in KINDS.items():
        assert SOURCES[kind] and card.name.endswith(" GB")
        assert 20 < card.gib < float(card.name.split()[-2])  # of 1e9 bytes
        assert 50 < card.tflops < 3000 and 250 < card.memory_gb_s < 9000
        assert card.network_gb_s <= card.link_gb_s or card.link_gb_s <= 30
        assert named(kind) == Machine(card, 1, card.host_gib)


@pytest.mark.parametrize(
    ("listing", "name", "gpus"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\n" * 4, "H100 80 GB", 4),
        ("NVIDIA A100-SXM4-40GB, 40960\n", "A100 40 GB", 1),
        ("NVIDIA A100-SXM4-80GB, 81920\n" * 2, "A100 80 GB", 2),
        ("NVIDIA A10G, 23028\n", "A10 24 GB", 1),
        ("NVIDIA GeForce RTX 4090, 24564\n" * 2, "RTX 4090 24 GB", 2),
        ("Tesla T4, 15360\n", "Tesla T4", 1),
    ],
)
def test_a_machine_by_what_nvidia_smi_lists(listing, name, gpus):
    machine = machine_of(listing, 100.0)
    assert (machine.card.name, machine.gpus, machine.host_gib) == (name, gpus, 100)


def test_the_smallest_of_different_cards_counts():
    machine = machine_of("NVIDIA H100 80GB HBM3, 81559\nTesla T4, 15360\n", 100.0)
    assert machine.gpus == 2 and machine.card.gib == 15


def test_here_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA L40S, 46068\\nNVIDIA L40S, 46068\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = named("here", 77.0)
    assert (machine.card, machine.gpus, machine.host_gib) == (KINDS["l40s"], 2, 77)
    assert named("here").host_gib > 0.5  # what this machine has
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert named("here").gpus == 1
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ValueError, match="no GPU that nvidia-smi can see; name the GPUs, such as --plan h100x8"):
        cards.of_this_machine()
