"""An output head in files whose configuration says that the vocabulary serves as the head."""

from collections.abc import Mapping

from ..architecture import LanguageConfig
from ..errors import CheckpointError
from .gguf_files import GgufFiles
from .safetensors_files import SafetensorsFiles, StoredTensor

_COMPARED_BYTES = 1 << 24  # at once


def check_tied(
    files: SafetensorsFiles | GgufFiles, stored: Mapping[str, StoredTensor], language: LanguageConfig, is_whole: bool = True
) -> None:
    """Refuse a head that is another than the vocabulary that the configuration ties it to: which of the two is right, nobody knows.
    ``is_whole``: all of them is compared; else their first 16 MiB, unless a file is a draft, whose values are not here.

    Raises: CheckpointError.
    """
    head, vocabulary = stored.get("lm_head.weight"), stored.get("language.embed_tokens.weight")
    if not language.tie_embeddings or head is None or vocabulary is None or isinstance(files, GgufFiles):
        return
    one, other = files.view(head), files.view(vocabulary)
    end = len(one) if is_whole else 0 if _is_draft(head) or _is_draft(vocabulary) else _COMPARED_BYTES
    parts = (slice(start, start + _COMPARED_BYTES) for start in range(0, end, _COMPARED_BYTES))
    is_same = (head.shape, head.dtype) == (vocabulary.shape, vocabulary.dtype)
    if not is_same or any(bytes(one[part]) != bytes(other[part]) for part in parts):
        raise CheckpointError(
            f"{head.file}: the output head (lm_head.weight) is not the vocabulary, and config.json says tie_word_embeddings: true: with"
            " false the head is used"
        )


def _is_draft(tensor: StoredTensor) -> bool:
    """Whether a tensor's file has holes (``hub/headers``). A file system that compresses tells so of others: what is read then is
    compared when it is loaded."""
    found = tensor.file.stat()
    return found.st_blocks * 512 < found.st_size
