"""Qwen3-ASR, served: what is heard of a file is transformers' argmax from the samples on, in any format that clients send, and outlives
a killed stage. Transcripts come through OpenAI's client."""

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from mmrt.tests.end_to_end.conftest import Server, launching
from mmrt.tests.end_to_end.oracle import check_argmax
from mmrt.tests.end_to_end.test_media import sound, text

NUM_TOKENS = 16  # transformers shortens what is said twenty times
SHORT = {"max_completion_tokens": NUM_TOKENS}
FORMATS = {"mp3": ("mp3", "mp3"), "flac": ("flac", "flac"), "ogg": ("ogg", "libopus"), "webm": ("webm", "libopus")}


class SpeechOracle:
    """The checkpoint in transformers, float32."""

    def __init__(self, checkpoint: Any) -> None:
        import transformers

        torch.set_num_threads(1)
        self.processor: Any = transformers.AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
        self.model: Any = transformers.AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def check(self, samples: NDArray[np.float32], ids: list[int], **asked: Any) -> str:
        """Fail unless each id is the argmax behind its prefix. Returns the transcript."""
        inputs = self.processor.apply_transcription_request(samples, **asked)
        length = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([ids[:-1]], dtype=torch.long)), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        check_argmax(self.model(**inputs, use_cache=False).logits[0, length - 1 :].float(), ids)
        transcript: str = self.processor.decode(ids, return_format="transcription_only")
        return transcript

    def transcript(self, samples: NDArray[np.float32], num_tokens: int, **asked: Any) -> str:
        inputs = self.processor.apply_transcription_request(samples, **asked)
        ids = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        transcript: str = self.processor.decode(ids, return_format="transcription_only")
        return transcript


class Speech:
    def __init__(self, server: Server, oracle: SpeechOracle) -> None:
        self.server, self.oracle = server, oracle

    def chat(self, content: list[dict[str, Any]]) -> tuple[str, list[int]]:
        return self.server.chat(content, max_tokens=NUM_TOKENS)

    def transcribe(self, data: bytes, name: str = "a.wav", **asked: Any) -> Any:
        asked = {"model": self.server.checkpoint.name, "extra_body": SHORT, **asked}
        return self.server.client.audio.transcriptions.create(file=(name, data), **asked)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[..., Any]) -> Iterator[Speech]:
    with launching(tmp_path_factory, checkpoints) as start:
        yield Speech(start("qwen3_asr"), SpeechOracle(checkpoints("qwen3_asr")))


def wav_of(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part["input_audio"]["data"])


@pytest.mark.parametrize("seconds", [0.2, 8.31, 20.007])
def test_what_is_heard(speech: Speech, seconds: float) -> None:
    """Of one segment, which is filled up, of two and of three."""
    part, samples = sound(seconds, 440)
    _, ids = speech.chat([part])
    told = speech.oracle.check(samples, ids)
    assert speech.transcribe(wav_of(part)).text == told
    context = [{"role": "system", "content": "Ångström, Erdős"}, {"role": "user", "content": [part]}]
    _, other = speech.chat(context)
    told = speech.oracle.check(samples, other, prompt="Ångström, Erdős")
    assert other != ids and speech.transcribe(wav_of(part), prompt="Ångström, Erdős").text == told


def test_a_language_and_a_stream(speech: Speech) -> None:
    part, samples = sound(9.5, 300)
    found = speech.transcribe(wav_of(part), language="fr", response_format="verbose_json", extra_body={"max_completion_tokens": 8})
    assert (found.language, found.duration) == ("french", 9.5)
    assert found.text == speech.oracle.transcript(samples, 8, language="fr")
    events = [*speech.transcribe(wav_of(part), language="fr", stream=True, extra_body={"max_completion_tokens": 8})]
    assert events[-1].text == found.text == "".join(event.delta for event in events[:-1]) and events[-1].usage.output_tokens == 8


@pytest.mark.slow
def test_a_model_that_is_told_in_words(launch: Callable[..., Server], checkpoints: Callable[..., Any]) -> None:
    """Qwen2-Audio: a clip of half a minute and a short one between words; a longer one is refused with the limit."""
    import transformers

    server, path = launch("qwen2_audio"), checkpoints("qwen2_audio")
    processor: Any = transformers.AutoProcessor.from_pretrained(path, local_files_only=True)
    model: Any = transformers.AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    (short, samples), (whole, more) = sound(1.3, 440), sound(30, 300)
    _, ids = server.chat([short, text("And"), whole, text("Compare.")], max_tokens=NUM_TOKENS)
    plain = [{"type": "audio"}, text("And"), {"type": "audio"}, text("Compare.")]
    said = processor.apply_chat_template([{"role": "user", "content": plain}], tokenize=False, add_generation_prompt=True)
    inputs = processor(text=said, audio=[samples, more], sampling_rate=16000, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([ids[:-1]], dtype=torch.long)), 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        check_argmax(model(**inputs, use_cache=False).logits[0, length - 1 :].float(), ids)
    name = path.name
    assert server.client.audio.transcriptions.create(model=name, file=("a.wav", wav_of(short)), extra_body=SHORT).text
    with pytest.raises(openai.BadRequestError, match="the audio is longer than the limit of 30 s"):
        server.client.audio.transcriptions.create(model=name, file=("a.wav", wav_of(sound(30.01, 300)[0])))
    server.down()


@pytest.mark.parametrize("name", FORMATS)
def test_files_as_clients_send_them(speech: Speech, name: str) -> None:
    """The transcript is that of the same bytes in a chat."""
    container, codec = FORMATS[name]
    data = io.BytesIO()
    with av.open(data, "w", container) as out:
        stream: Any = out.add_stream(codec, rate=48000, layout="mono")
        samples = (np.sin(np.arange(72000) / 9) * 9000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.rate = 48000
        for packet in (*stream.encode(frame), *stream.encode(None)):
            out.mux(packet)
    url = {"url": f"data:audio/{name};base64,{base64.b64encode(data.getvalue()).decode()}"}
    said, _ = speech.chat([{"type": "audio_url", "audio_url": url}])
    assert said.strip() and speech.transcribe(data.getvalue(), f"voice.{name}").text == said.strip()


def test_a_killed_encoder_changes_no_token(speech: Speech) -> None:
    part, samples = sound(60.5, 220)
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.append(speech.chat([part])[1])) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    speech.server.kill("encoder")
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    speech.oracle.check(samples, answers[0])
    speech.server.wait_until_empty()
