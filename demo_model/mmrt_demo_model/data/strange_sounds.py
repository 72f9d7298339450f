"""Sounds that the demo model's world does not have: chords, melodies, something like speech, drums, gusts, chirps.

``KINDS`` are for training, ``HELD_OUT`` for the exam alone. Each makes float32 [samples] of ``seconds``, peak about 1.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .drawing import Rng
from .kinds import SOUND_RATE, chance, pick

Wave = npt.NDArray[np.float32]
Make = Callable[[Rng, float], Wave]
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410), (490, 1350, 1690))


def _times(seconds: float) -> Wave:
    return np.arange(round(seconds * SOUND_RATE), dtype=np.float32) / np.float32(SOUND_RATE)


def _walk(rng: Rng, seconds: float, per_s: float) -> Wave:
    """0 to 1, wandering, with so many turns a second."""
    time_s = _times(seconds)
    num = max(2, round(seconds * per_s) + 1)
    return np.interp(time_s, np.linspace(0, seconds, num), rng.random(num)).astype(np.float32)


def _hiss(rng: Rng, num: int, low_hz: float, high_hz: float) -> Wave:
    """Noise between two frequencies."""
    spectrum = np.fft.rfft(rng.standard_normal(num))
    frequency = np.fft.rfftfreq(num, 1 / SOUND_RATE)
    spectrum[(frequency < low_hz) | (frequency > high_hz)] = 0
    wave = np.fft.irfft(spectrum, num)
    return (wave / max(float(np.abs(wave).max()), 1e-9)).astype(np.float32)


def _string(rng: Rng, hz: float, seconds: float, fall: float) -> Wave:
    """A note that falls off, with overtones."""
    time_s = _times(seconds)
    total = np.zeros_like(time_s)
    for k in range(1, 9):
        if hz * k < SOUND_RATE / 2:
            total += np.sin(np.float32(2 * math.pi * hz * k) * time_s + np.float32(rng.uniform(0, 6.28))) * np.float32(rng.random() / k)
    note: Wave = total * np.exp(-time_s * np.float32(fall))
    return note


def _chord(rng: Rng, seconds: float) -> Wave:
    base = rng.uniform(90, 400)
    steps = rng.choice(np.arange(1, 25), int(rng.integers(2, 5)), replace=False)
    fall = rng.uniform(0, 2)
    total = _string(rng, base, seconds, fall)
    for step in steps.tolist():
        total = total + _string(rng, base * 2 ** (step / 12), seconds, fall)
    return total


def _melody(rng: Rng, seconds: float) -> Wave:
    """Notes one behind the other, at times over a bass."""
    total = np.zeros(round(seconds * SOUND_RATE), np.float32)
    base, beat = rng.uniform(150, 500), rng.uniform(0.1, 0.35)
    for start_s in np.arange(0, seconds - 0.08, beat).tolist():
        hz = base * 2 ** (pick(rng, (0, 2, 4, 5, 7, 9, 11, 12, 14)) / 12)
        note = _string(rng, hz, min(beat * rng.uniform(1, 3), seconds - start_s), rng.uniform(1, 6))
        first = round(start_s * SOUND_RATE)
        total[first : first + len(note)] += note[: len(total) - first]
    return total + (_string(rng, base / 4, seconds, 0.3) if chance(rng, 0.4) else np.float32(0))


def _speech(rng: Rng, seconds: float) -> Wave:
    """A voice whose resonances go from vowel to vowel, with hisses and pauses between."""
    time_s = _times(seconds)
    voice_hz = rng.uniform(85, 230) * (0.85 + 0.4 * _walk(rng, seconds, 3))
    turns = np.cumsum(voice_hz, dtype=np.float64) / SOUND_RATE
    num = max(2, round(seconds * rng.uniform(4, 8)))
    vowels = np.array([pick(rng, _VOWELS) for _ in range(num)], np.float32) * np.float32(rng.uniform(0.9, 1.15))
    at = np.linspace(0, seconds, num)
    formants = [np.interp(time_s, at, vowels[:, k]) for k in range(3)]
    total = np.zeros_like(time_s)
    for k in range(1, int(3500 / float(voice_hz.mean())) + 1):
        hz = k * voice_hz
        level = sum(g / (1 + ((hz - formant) / 90) ** 2) for g, formant in zip((1, 0.6, 0.3), formants, strict=True))
        total += (level * np.sin(2 * math.pi * k * turns)).astype(np.float32)
    loud = np.interp(time_s, np.linspace(0, seconds, 3 * num), _syllables(rng, num))
    hiss = _hiss(rng, len(time_s), 2500, 7000) * np.interp(time_s, np.linspace(0, seconds, 3 * num), rng.random(3 * num) ** 6)
    return (total * loud / 1.5 + 0.4 * hiss).astype(np.float32)


def _syllables(rng: Rng, num: int) -> Wave:
    """Loudness: up and down with each of them, some left out."""
    levels = np.zeros(3 * num, np.float32)
    levels[1::3] = (rng.random(num) < 0.85) * rng.uniform(0.5, 1, num)
    levels[2::3] = levels[1::3] * rng.uniform(0.3, 1, num)
    return levels


def _drums(rng: Rng, seconds: float) -> Wave:
    """Thumps and rattles at a pace."""
    total = np.zeros(round(seconds * SOUND_RATE), np.float32)
    beat = rng.uniform(0.09, 0.25)
    for number, start_s in enumerate(np.arange(0, seconds - 0.05, beat).tolist()):
        time_s = _times(min(0.3, seconds - start_s))
        if number % 4 == 0 or chance(rng, 0.2):
            hit = np.sin(2 * math.pi * rng.uniform(3, 8) * (1 - np.exp(-time_s * 25))) * np.exp(-time_s * 14)
        else:
            hit = _hiss(rng, len(time_s), rng.uniform(300, 5000), 8000) * np.exp(-time_s * np.float32(rng.uniform(15, 60)))
        first = round(start_s * SOUND_RATE)
        total[first : first + len(hit)] += (hit * rng.uniform(0.3, 1)).astype(np.float32)[: len(total) - first]
    return total


def _gusts(rng: Rng, seconds: float) -> Wave:
    """Wind and waves: noise that swells and changes its colour."""
    num = round(seconds * SOUND_RATE)
    low, high = _hiss(rng, num, 40, rng.uniform(200, 600)), _hiss(rng, num, 800, rng.uniform(2000, 7000))
    loud = _walk(rng, seconds, rng.uniform(1, 5)) ** 2
    return low * loud + high * _walk(rng, seconds, rng.uniform(1, 5)) ** 3


def _warble(rng: Rng, seconds: float) -> Wave:
    """A tone whose frequency goes up and down fast."""
    depth, rate = rng.uniform(0.06, 0.5), rng.uniform(3, 30)
    hz = rng.uniform(200, 1800) * (1 + depth * np.sin(2 * math.pi * rate * _times(seconds)))
    return np.sin(2 * math.pi * np.cumsum(hz, dtype=np.float64) / SOUND_RATE).astype(np.float32)


def _chirps(rng: Rng, seconds: float) -> Wave:
    """Birds: short calls that sweep far, close together."""
    total = np.zeros(round(seconds * SOUND_RATE), np.float32)
    at_s = rng.uniform(0, 0.1)
    while at_s < seconds - 0.05:
        length_s = min(rng.uniform(0.03, 0.2), seconds - at_s)
        time_s = _times(length_s)
        hz = rng.uniform(1200, 5000) * (1 + rng.uniform(-0.6, 0.6) * np.sin(rng.uniform(2, 12) * time_s / length_s))
        call = np.sin(2 * math.pi * np.cumsum(hz, dtype=np.float64) / SOUND_RATE) * np.sin(math.pi * time_s / length_s)
        first = round(at_s * SOUND_RATE)
        total[first : first + len(call)] += (call * rng.uniform(0.3, 1)).astype(np.float32)[: len(total) - first]
        at_s += length_s + rng.uniform(0.01, 0.25)
    return total


def _engine(rng: Rng, seconds: float) -> Wave:
    """Pulses so close that they hum, with a rattle."""
    hz = rng.uniform(18, 70) * (0.7 + 0.6 * _walk(rng, seconds, 1.5))
    turns = np.cumsum(hz, dtype=np.float64) / SOUND_RATE
    pulse = (1 - turns % 1) ** rng.uniform(2, 12)
    rattle = 0.5 + _hiss(rng, len(pulse), 60, rng.uniform(800, 5000))
    return np.asarray(pulse * rattle - pulse.mean() / 2, np.float32)


def _bells(rng: Rng, seconds: float) -> Wave:
    """Struck metal: overtones that are no multiples."""
    total = np.zeros(round(seconds * SOUND_RATE), np.float32)
    for _ in range(int(rng.integers(3, 8))):
        start_s, base = rng.uniform(0, 0.6 * seconds), rng.uniform(200, 900)
        time_s = _times(seconds - start_s)
        hit = sum(np.sin(2 * math.pi * base * f * time_s) * np.exp(-time_s * (1 + f)) / f for f in (0.5, 1, 1.19, 1.56, 2, 2.66, 3.01))
        first = round(start_s * SOUND_RATE)
        total[first : first + len(hit)] += hit.astype(np.float32)[: len(total) - first]
    return total


def _dialling(rng: Rng, seconds: float) -> Wave:
    """Two tones at once for each key of a telephone, seven keys or more."""
    total = np.zeros(round(seconds * SOUND_RATE), np.float32)
    length_s = seconds / int(rng.integers(7, 14))
    for number in range(int(seconds / length_s)):
        low, high = pick(rng, (697.0, 770.0, 852.0, 941.0)), pick(rng, (1209.0, 1336.0, 1477.0))
        time_s = _times(length_s * 0.65)
        first = round(number * length_s * SOUND_RATE)
        total[first : first + len(time_s)] = (np.sin(2 * math.pi * low * time_s) + np.sin(2 * math.pi * high * time_s))[
            : len(total) - first
        ]
    return total


def _crowd(rng: Rng, seconds: float) -> Wave:
    total = np.sum([_speech(rng, seconds) for _ in range(int(rng.integers(2, 5)))], axis=0)
    return np.asarray(total + 0.1 * _hiss(rng, len(total), 100, 4000), np.float32)


def _siren(rng: Rng, seconds: float) -> Wave:
    """Up and down, again and again."""
    swing = np.abs(2 * ((rng.uniform(1, 3) * _times(seconds)) % 1) - 1)
    hz = rng.uniform(400, 700) * (1 + swing)
    turns = np.cumsum(hz, dtype=np.float64) / SOUND_RATE
    return (np.sin(2 * math.pi * turns) + 0.3 * np.sin(6 * math.pi * turns)).astype(np.float32)


def _crackle(rng: Rng, seconds: float) -> Wave:
    """A fire, or rain on a roof: single clicks."""
    num = round(seconds * SOUND_RATE)
    clicks = (rng.random(num) < rng.uniform(10, 60) / SOUND_RATE) * rng.normal(0, 1, num)
    ring = np.exp(-np.arange(120) / rng.uniform(5, 30)) * rng.standard_normal(120)
    return (np.convolve(clicks, ring)[:num] + 0.03 * _hiss(rng, num, 50, 2000)).astype(np.float32)


KINDS: tuple[Make, ...] = (_chord, _melody, _speech, _speech, _speech, _drums, _gusts, _warble, _chirps, _engine)
_SHORT = (_chord, _speech, _drums, _engine)  # no more of these than a moment is needed to know that they are no beeps
_LEAST_S, _LONG_S = 0.5, 4.0
HELD_OUT: tuple[Make, ...] = (_bells, _dialling, _crowd, _siren, _crackle)


def _apart(rng: Rng, make: Make) -> Wave:
    """One to four short pieces with silence around them, as beeps have."""
    parts = [_silence(rng)]
    for _ in range(int(rng.integers(1, 5))):
        parts += [_level(make(rng, rng.uniform(0.12, 0.5))), _silence(rng)]
    return np.concatenate(parts)


def _silence(rng: Rng) -> Wave:
    return np.zeros(round(rng.uniform(0.05, 0.5) * SOUND_RATE), np.float32)


def _level(wave: Wave) -> Wave:
    return wave / np.float32(max(float(np.abs(wave).max()), 1e-6))


def strange_wave(rng: Rng, make: Make, seconds: float) -> Wave:
    """A sound of a kind, as loud as the others; short ones at times in pieces; at times with noise behind it."""
    is_apart = make in _SHORT and seconds < _LONG_S and chance(rng, 0.5)
    wave = _level(_apart(rng, make) if is_apart else make(rng, max(seconds, _LEAST_S)))
    if chance(rng, 0.3):
        wave = wave + np.float32(rng.uniform(0.005, 0.1)) * rng.standard_normal(len(wave)).astype(np.float32)
    return np.asarray(np.clip(wave * np.float32(rng.uniform(0.25, 0.9)), -1, 1), np.float32)
