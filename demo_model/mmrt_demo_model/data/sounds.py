"""Sounds: a tone, a gliding tone, beeps or noise; and what can be asked about them."""

import math

import numpy as np
import numpy.typing as npt

from . import phrases
from .degrade import degrade_sound
from .drawing import Rng
from .kinds import NUMBERS, SOUND_RATE, Note, Question, Sound, chance, counted, pick, sentence

LOW_HZ, HIGH_HZ = (130.0, 330.0), (900.0, 2600.0)
Wave = npt.NDArray[np.float32]


def _timbre(rng: Rng) -> list[float]:
    """Strengths of the overtones, from the first."""
    return pick(rng, ([1.0], [1.0], [1.0, 0.5, 0.25], [1.0, 0.0, 0.33, 0.0, 0.2], [1.0, 0.3]))


def _oscillate(turns: npt.NDArray[np.float64], timbre: list[float]) -> Wave:
    """Sound of this phase (in turns), peak about 1."""
    total = sum(level * np.sin((2 * math.pi * (k + 1)) * turns) for k, level in enumerate(timbre) if level)
    return np.asarray(total / sum(timbre), np.float32)


def _faded(wave: Wave, fade_s: float) -> Wave:
    """Without clicks at its ends, in place."""
    num = max(1, min(len(wave) // 3, round(fade_s * SOUND_RATE)))
    ramp = np.linspace(0, 1, num, dtype=np.float32)
    wave[:num] *= ramp
    wave[-num:] *= ramp[::-1]
    return wave


def frequency(rng: Rng, pitch: str) -> float:
    """In Hz; high, low or, for '', anything from 150 to 2500."""
    low, high = {"low": LOW_HZ, "high": HIGH_HZ, "": (150.0, 2500.0)}[pitch]
    return float(low * (high / low) ** rng.random())


def _finish(rng: Rng, wave: Wave, degraded: bool, is_noise: bool = False) -> Wave:
    wave = wave * np.float32(rng.uniform(0.25, 0.9))
    return degrade_sound(rng, wave, is_noise) if degraded else wave


def _silence(rng: Rng, most_s: float) -> Wave:
    return np.zeros(round(rng.uniform(0, most_s) * SOUND_RATE), np.float32)


def _note(start: int, length: int, hz: tuple[float, ...]) -> Note:
    return Note(start / SOUND_RATE, (start + length) / SOUND_RATE, hz)


def tone(rng: Rng, degraded: bool, pitch: str, seconds: float = 0.0) -> Sound:
    """seconds: 0 draws them."""
    hz = frequency(rng, pitch)
    turns = hz * np.arange(round((seconds or rng.uniform(0.8, 3.0)) * SOUND_RATE)) / SOUND_RATE
    before = _silence(rng, 0.3)
    wave = np.concatenate([before, _faded(_oscillate(turns, _timbre(rng)), 0.02), _silence(rng, 0.3)])
    return Sound(_finish(rng, wave, degraded), "tone", (_note(len(before), len(turns), (hz,)),), (hz,))


def glide(rng: Rng, degraded: bool) -> Sound:
    """Evenly up or down, by a factor of 2 to 6, in 0.8 to 3 seconds."""
    factor = rng.uniform(2, 6)
    low = 150 * (2600 / factor / 150) ** rng.random()
    start, end = (low, low * factor) if chance(rng, 0.5) else (low * factor, low)
    num = round(rng.uniform(0.8, 3.0) * SOUND_RATE)
    along = np.linspace(0, 1, num)
    hz = start * (end / start) ** along if chance(rng, 0.5) else start + (end - start) * along
    wave = _faded(_oscillate(np.cumsum(hz) / SOUND_RATE, _timbre(rng)), 0.02)
    before = _silence(rng, 0.3)
    wave = np.concatenate([before, wave, _silence(rng, 0.3)])
    notes = (_note(len(before), num, tuple(hz[:: SOUND_RATE // 1000].tolist())),)
    return Sound(_finish(rng, wave, degraded), "glide", notes, (float(start), float(end)))


def beeps(rng: Rng, degraded: bool, count: int, pitch: str = "") -> Sound:
    """Beeps of 0.08 to 0.3 s, with 0.2 s or more between them. Without ``pitch`` half of them change their frequency."""
    length_s, gap_s, timbre = rng.uniform(0.08, 0.3), rng.uniform(0.2, 0.45), _timbre(rng)
    changing = not pitch and chance(rng, 0.5)
    hz = frequency(rng, pitch)
    parts, frequencies, notes = [_silence(rng, 0.4)], [], []
    for number in range(count):
        if changing and number:
            hz = frequency(rng, "") if chance(rng, 0.5) else min(3000.0, hz * rng.uniform(1.1, 1.5))
        frequencies.append(hz)
        turns = hz * np.arange(round(length_s * SOUND_RATE)) / SOUND_RATE
        notes.append(_note(sum(len(part) for part in parts), len(turns), (hz,)))
        parts.append(_faded(_oscillate(turns, timbre), 0.01))
        if number < count - 1:
            parts.append(np.zeros(round(gap_s * rng.uniform(1, 1.25) * SOUND_RATE), np.float32))
    parts.append(_silence(rng, 0.4))
    short = round(0.5 * SOUND_RATE) - sum(len(part) for part in parts)
    parts.append(np.zeros(max(0, short), np.float32))
    return Sound(_finish(rng, np.concatenate(parts), degraded), "beeps", tuple(notes), tuple(frequencies), count)


def noise(rng: Rng, degraded: bool, seconds: float = 0.0) -> Sound:
    """White, or with less of the high frequencies. seconds: 0 draws them."""
    wave = rng.standard_normal(round((seconds or rng.uniform(0.6, 3.0)) * SOUND_RATE), np.float32)
    if chance(rng, 0.5):
        width = int(rng.integers(2, 12))
        wave = np.convolve(wave, np.full(width, width**-0.5, np.float32), "same").astype(np.float32)
    wave = _faded(wave * np.float32(0.33), 0.02)
    return Sound(np.clip(_finish(rng, wave, degraded, is_noise=True), -1, 1), "noise", (_note(0, len(wave), ()),))


def audio(rng: Rng, degraded: bool) -> tuple[Sound, list[Question]]:
    """A sound and all questions about it."""
    kind = rng.random()
    pitch = pick(rng, ("low", "high"))
    if kind < 0.3:
        sound = tone(rng, degraded, pitch)
    elif kind < 0.55:
        sound, pitch = glide(rng, degraded), ""
    elif kind < 0.85:
        pitch = pitch if chance(rng, 0.4) else ""
        sound = beeps(rng, degraded, int(rng.integers(1, 6)), pitch)
    else:
        sound, pitch = noise(rng, degraded), ""
    return sound, sound_questions(rng, sound, pitch)


def sound_questions(rng: Rng, sound: Sound, pitch: str) -> list[Question]:
    ask = phrases.asker(rng)
    questions = []
    if pitch:
        questions.append(ask("pitch", sentence(pitch)))
    if sound.kind == "noise":
        if chance(rng, 0.5):
            questions.append(ask("audio_absent", "It is noise.", phrase=pick(rng, ("pitch", "glide"))))
        return [*questions, ask("tone_noise", "Noise."), ask("sound_describe", "Noise.")]
    if sound.kind == "beeps":
        questions.append(ask("beeps", sentence(NUMBERS[sound.count])))
        questions.append(ask("sound_describe", sentence(counted(sound.count, "beep"))))
        if chance(rng, 0.15):
            questions.append(ask("tone_noise", "A tone.", naming="noise"))
        return questions
    if chance(rng, 0.25):
        questions.append(ask("audio_absent", "I hear no beeps.", phrase="beeps"))
    change = "steady"
    if sound.kind == "glide":
        change = "rising" if sound.frequencies_hz[1] > sound.frequencies_hz[0] else "falling"
    kind = sentence(f"a {pitch} tone" if pitch else f"a {change} tone")
    if chance(rng, 0.2):
        questions.append(ask("tone_noise", "A tone."))
    if sound.kind == "glide" or chance(rng, 0.45):
        questions.append(ask("glide", sentence(change)))
    return [*questions, ask("sound_describe", kind)]
