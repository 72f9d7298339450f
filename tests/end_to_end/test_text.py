"""Text through all processes: every greedy token is transformers' argmax, however requests are batched and chunked."""

import json
import signal
import threading
from typing import Any
from urllib.request import Request, urlopen

from mmrt.tests.end_to_end.conftest import Server
from mmrt.tests.end_to_end.oracle import Oracle
from mmrt.tests.settings import ImportedLater

transformers: Any = ImportedLater("transformers")
QUESTIONS = ["Hi", "What is the colour of the sky on a clear day?", "Tell me a story. " * 20, "1 2 3 4", "naïve café — ÿ 漢字 🙂"]


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_greedy_tokens_are_transformers_argmax(server: Server, oracle: Oracle) -> None:
    for question in QUESTIONS:
        _, ids = server.chat(question)
        oracle.check_greedy(oracle.inputs(ask(question)), ids)


def test_sixteen_at_once(server: Server, oracle: Oracle) -> None:
    prompts = [f"{index}: " + "many words follow here " * (index * 3) for index in range(16)]
    answers: dict[str, list[int]] = {}

    def run(index: int) -> None:
        answers[prompts[index]] = server.chat(prompts[index], max_tokens=8 + 2 * index)[1]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, ids in answers.items():
        oracle.check_greedy(oracle.inputs(ask(prompt)), ids)
    assert len(answers) == 16
    server.wait_until_empty()


def test_the_first_text_does_not_wait_for_decode(server: Server, oracle: Oracle) -> None:
    """It comes while decode is stopped, and so does an answer of one token; then decode goes on behind it."""
    how = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True, "cache_salt": "stopped"}}
    ids: list[int] = []
    server.kill("decode", signal.SIGSTOP)
    try:
        stream = server.stream(QUESTIONS[1], **how)
        while not ids:
            ids += getattr(next(stream).choices[0], "token_ids", None) or []
        assert len(ids) == 1 and server.chat(QUESTIONS[1], max_tokens=1, **how)[1] == ids
    finally:
        server.kill("decode", signal.SIGCONT)
    for chunk in stream:
        ids += getattr(chunk.choices[0], "token_ids", None) or [] if chunk.choices else []
    assert len(ids) == 24
    oracle.check_greedy(oracle.inputs(ask(QUESTIONS[1])), ids)


def test_stream_and_whole_answer_are_equal(server: Server) -> None:
    text, ids = server.chat(QUESTIONS[1])
    whole = server.client.chat.completions.create(
        model=server.checkpoint.name,
        messages=ask(QUESTIONS[1]),
        max_tokens=24,
        temperature=0,  # type: ignore[arg-type]
    )
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(ids)


def test_system_prompt_and_history(server: Server, oracle: Oracle) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Who are you?"},
    ]
    _, ids = server.chat(messages)
    oracle.check_greedy(oracle.inputs(messages), ids)


def test_a_seed_repeats_a_sampled_answer(server: Server) -> None:
    drawn = {"temperature": 2.0, "max_tokens": 48, "extra_body": {"ignore_eos": True}}
    answers = {server.chat("Say something.", seed=seed, **drawn)[0] for seed in (1, 1, 2)}
    assert len(answers) == 2


def test_stops_of_a_request(server: Server) -> None:
    text, ids = server.chat("Tell me.", extra_body={"ignore_eos": True})
    at = next(at for at in range(6, len(ids)) if ids[at] not in ids[:at])
    stopped, own = server.chat("Tell me.", extra_body={"ignore_eos": True, "stop_token_ids": [ids[at], 5]})
    assert own == ids[: at + 1] and text.startswith(stopped)
    stop = text[10:13]
    end = text.index(stop)
    assert server.chat("Tell me.", stop=stop, extra_body={"ignore_eos": True})[0] == text[:end]
    included = server.chat("Tell me.", stop=stop, extra_body={"ignore_eos": True, "include_stop_str_in_output": True})
    assert included[0] == text[: end + len(stop)]


def test_tokens_of_a_conversation_are_those_of_transformers(server: Server) -> None:
    def post(route: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        with urlopen(Request(f"{server.url}/{route}", data, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)

    theirs = transformers.AutoTokenizer.from_pretrained(server.checkpoint)
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello, world!"}]
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    found = post("tokenize", messages=plain)
    assert found["tokens"] == theirs.encode(expected, add_special_tokens=False) and found["count"] == len(found["tokens"])
    assert post("detokenize", tokens=found["tokens"]) == {"prompt": expected}
    forged = post("tokenize", messages=[{"role": "user", "content": "What is <|im_end|> for?"}])["tokens"]
    assert "What is <|im_end|> for?" in theirs.decode(forged), "only its characters, as in a request"
    assert forged.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 1
