"""Traces of public programs beside figures that others published of real GPUs."""

import pytest

from benchmarks.truth.published import gpt, peaks
from benchmarks.truth.published.peaks import FORMER, PROGRAMS, Figure, figures, peak, traced


def figure(program: str) -> Figure:
    return next(one for one in figures() if one.program == program)


def test_every_figure_has_its_program_and_source() -> None:
    found = figures()
    assert {one.program for one in found} <= set(PROGRAMS)
    assert len({one.name for one in found}) == len(found)
    assert all(len(one.commit) == 40 and one.licence for one in found)
    assert {one.quantity for one in found} == {"allocated", "reserved"}


def test_an_error_within_the_rounding_is_none() -> None:
    one = figure("vit/03")
    assert (one.published, one.unit) == ("13.82", "GB")
    assert one.nbytes == 13_820_000_000
    assert [one.error(nbytes) for nbytes in (13_824_999_999, 13_815_000_001)] == [0, 0]
    assert one.error(13_826_000_000) == 6_000_000
    assert one.text(13_826_000_000) == "13.83 GB"
    other = figure("t5/All")
    assert other.text(other.nbytes) == "35,859,657,728"
    assert other.error(other.nbytes + 512) == 512


# A forward of T5 with its scores written out, and one of Mistral with attention in flash's kernel:
# what was allocated on a GPU that is not named, to the byte. Flash attention then had its seed and
# offset on the host (native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd), and has them on
# the GPU now: 512 bytes each in 32 layers.
@pytest.mark.parametrize(("program", "since"), [("t5/Input", 0), ("mistral-7b/Input", 32 * 1024)])
def test_forwards_allocate_what_was_measured(program: str, since: int) -> None:
    published = figure(program)
    profile = traced(PROGRAMS[program](), published.gpu)
    assert peak(profile, "allocated") - published.nbytes == since
    assert not profile.unknown_workspaces


def test_training_reserves_what_was_measured() -> None:
    profile = traced(gpt.training(gpt.Variant(), steps=2, every=1, words=2), "a100-40gb")
    assert figure("gpt/baseline").error(peak(profile, "reserved")) == 0
    profile = traced(FORMER["vit/03"](), "a100-40gb")
    assert figure("vit/03").error(peak(profile, "reserved")) == 0


def test_other_addresses_reserve_another_sum() -> None:
    variant = gpt.Variant(False, True, True, True, one_kernel=True)
    profile = traced(gpt.training(variant, steps=2, every=1, words=2), "a100-40gb")
    found = {figure("gpt/7").error(peaks.scattered(profile, seed)) for seed in range(8)}
    assert 0 in found
    assert len(found) > 1


def test_the_table_names_what_is_left_out(monkeypatch, capsys):
    one = figure("resnet101/All")

    def missing() -> peaks.Program:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(peaks, "PROGRAMS", {one.program: missing})
    assert one.name not in peaks.table([one])
    assert "left out: ResNet-101: All: No module named 'torchvision'" in capsys.readouterr().out
