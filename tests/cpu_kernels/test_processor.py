"""What Linux says of a processor: described by files."""

from pathlib import Path

import pytest

from mmrt.cpu_kernels.processor import processor_flags, processor_name

X86 = "processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\nflags\t\t: fpu avx2\nbogomips\t: 1\n\nprocessor\t: 1\nmodel name\t: Another\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n"
MIPS = "cpu model\t\t: Loongson\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name", "flags"),
    [
        (X86, "Some CPU @ 2.00GHz", {"fpu", "avx2"}),
        (ARM, None, {"fp", "asimd", "bf16"}),
        (MIPS, "Loongson", set()),
    ],
)
def test_name_and_flags_are_those_of_the_first_processor(tmp_path: Path, cpuinfo: str, name: str | None, flags: set[str]) -> None:
    """Without a name it is called by its architecture."""
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert processor_flags(tmp_path) == flags
    assert processor_name(tmp_path) == (name or processor_name(tmp_path / "nowhere"))


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert processor_flags(tmp_path) == set() and processor_name(tmp_path)
