"""Whether a checkpoint's ``tokenizer.json`` can be loaded in reasonable time. The ``tokenizers`` library cannot be interrupted.

Counts and sizes are bounded first. A file whose normalizer or pre-tokenizer is not known to be fast (NFC; splitting as the families'
own tokenizers do; bytes) is tried in a process of its own, which the kernel ends.
"""

import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import CheckpointError

MAX_FILE_BYTES = 256 << 20  # the largest known has 34 MB
MAX_ADDED_TOKENS = 65_536
TRIAL_CPU_S = 20
TRIAL_S = 60.0  # also where the machine is busy
_TRIAL_BYTES = 4 << 30
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAMPLE = "".join(char * 512 for char in "a0 \n.é字") + "a b1,\n" * 512


class _Stated(msgspec.Struct):
    """What decides; the vocabulary is skipped."""

    added_tokens: list[msgspec.Raw] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Stated).decode


def check_tokenizer(file: Path) -> None:
    """Raises: CheckpointError, for a file that is too large or has too many added tokens, or that takes too long or too much memory."""
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        stated = _decode(data)
    except msgspec.DecodeError:
        return  # the library says what is wrong
    check_number(file, len(stated.added_tokens))
    if not (_is_known(stated.normalizer) and _is_known(stated.pre_tokenizer)):
        _try(file)


def check_number(file: Path, num_added: int) -> None:
    """Raises: CheckpointError, if a file has too many added tokens."""
    if num_added > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{file} has {num_added} added tokens, the limit is {MAX_ADDED_TOKENS}")


def _is_known(part: msgspec.Raw) -> bool:
    """Return whether a normalizer or pre-tokenizer is of a kind that takes time in proportion to its text."""
    return _is_fast(msgspec.json.decode(part))


def _is_fast(part: object) -> bool:
    match part:
        case None | {"type": "NFC" | "ByteLevel"}:
            return True
        case {"type": "Replace", "pattern": {"String": str()}, "content": str(text)} | {"type": "Prepend", "prepend": str(text)}:
            return len(text) == 1
        case {"type": "Split", "pattern": {"String": str()}}:
            return True
        case {"type": "Metaspace", "replacement": str(text)}:
            return len(text) == 1
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return pattern == QWEN_SPLIT
        case {"type": "Sequence", "pretokenizers": [*parts]} | {"type": "Sequence", "normalizers": [*parts]}:
            return len(parts) <= 4 and all(map(_is_fast, parts))
    return False


def _try(file: Path) -> None:
    """Load the file and encode a sample of text in a process of its own. The caller meets other failures than time and memory."""
    try:
        done = subprocess.run([sys.executable, "-m", __name__, str(file), str(TRIAL_CPU_S)], capture_output=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{file}: {_SLOW} {TRIAL_S:g} s") from None
    if done.returncode < 0 or b"memory allocation" in done.stderr:
        raise CheckpointError(f"{file}: {_SLOW} {TRIAL_CPU_S} s of a processor or {_TRIAL_BYTES >> 30} GiB")
    if b"panicked at" in done.stderr:
        said = done.stderr.decode(errors="replace").splitlines()
        raise CheckpointError(f"{file}: its normalizer or pre-tokenizer fails on a sample of text: {said[-1][:200]}")


_SLOW = f"its normalizer or pre-tokenizer takes too long or too much: to load it and to encode {len(_SAMPLE)} characters took more than"


def main() -> None:
    """The process of a trial."""
    import tokenizers

    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
    resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    with suppress(ValueError):
        tokenizers.Tokenizer.from_file(sys.argv[1]).encode(_SAMPLE, add_special_tokens=False)


if __name__ == "__main__":
    main()
