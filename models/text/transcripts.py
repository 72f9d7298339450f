"""How models that were trained to write down speech do it, and the language that they put in front of their text."""

import msgspec

_LONGEST_NAME = 64  # characters, of one or several languages
_NO_LANGUAGE = "none"  # there was nobody to hear


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model that was trained to write down speech does it: ``before`` + language + ``marker`` + text. It hears the sound alone,
    and in the system message what may help, as names. ``languages``: ISO 639 code and the model's name of each."""

    before: str
    marker: str
    languages: tuple[tuple[str, str], ...]


class TranscriptReader:
    """Reads one answer. Blanks around the text do not belong to it; an answer that does not begin with a language is text.
    ``language``: its name; "" while it is not known, or if there is none."""

    def __init__(self, rules: SpeechRules, language: str = "") -> None:
        """``language``: the one that the prompt has named already."""
        self._rules = rules
        self.language = language
        self._is_text = bool(language)
        self._has_text = False
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certain with this."""
        self._held += text
        if not self._is_text:
            self._read_language()
        if not self._is_text:
            return ""
        shown = self._held.rstrip()
        self._held = self._held[len(shown) :]
        if not self._has_text:
            shown = shown.lstrip()
        self._has_text |= bool(shown)
        return shown

    def flush(self) -> str:
        """Return the rest, when nothing more will come."""
        if self._is_text:
            return ""
        self._is_text = True
        return self._held.strip()

    def _read_language(self) -> None:
        begun, before = self._held.lstrip(), self._rules.before
        if not begun.startswith(before):
            self._is_text = not before.startswith(begun)
            return
        name, marker, rest = begun.removeprefix(before).partition(self._rules.marker)
        if marker:
            self.language = "" if name.strip().lower() == _NO_LANGUAGE else name.strip()
            self._held, self._is_text = rest, True
        elif len(name) > _LONGEST_NAME:
            self._is_text = True
