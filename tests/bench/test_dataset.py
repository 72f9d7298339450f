"""Requests of data sets' own files, in each form that they are published in; and what is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrt.bench.serve.dataset import plan_dataset
from mmrt.bench.serve.options import parse_options
from mmrt.bench.serve.planned import plan_requests
from mmrt.bench.serve.workload import Calibration, MediaShapes, RequestPlan, make_body


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number, size in enumerate(((30, 20), (8, 40))):
        Image.new("RGB", size, (200, number, 0)).save(tmp_path / f"images/{number}.png")
    return tmp_path


def plans_of(folder: Path, records: list[Any], *, lines: bool = True, **options: Any) -> list[RequestPlan]:
    file = folder / "set.json"
    file.write_text("\n\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    given = {"num_requests": None, "seed": 0, "max_tokens": 64, "own_output": False, **options}
    return plan_dataset(file, **given)


def sent(plan: RequestPlan) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(make_body(plan, MediaShapes(), Calibration(), "m"))
    return body


def url_of(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


@pytest.mark.parametrize("lines", [True, False])
def test_questions_with_media(folder: Path, lines: bool) -> None:
    records = [{"prompt": "How many birds are there?"}, {"question": "And here?", "images": ["images/0.png", "https://host/1.jpg"]}]
    text, pictures = plans_of(folder, records, lines=lines)
    assert sent(text)["messages"] == [{"role": "user", "content": "How many birds are there?"}]
    assert (text.group, text.media, text.max_tokens, text.num_input_tokens) == ("text", (), 64, 7)
    assert [part.get("image_url", part.get("text")) for part in sent(pictures)["messages"][0]["content"]] == [
        {"url": url_of(folder / "images/0.png")},
        {"url": "https://host/1.jpg"},
        "And here?",
    ]
    assert pictures.group == "image" and [(one.width, one.height) for one in pictures.traced] == [(30, 20), (0, 0)]


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Unicode has more ends of lines, which stand in texts."""
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "One\u2028two\x85three?"}\r\n{"prompt": "Four?"}\n', newline="")
    plans = plan_dataset(file, None, seed=0, max_tokens=8, own_output=False)
    assert [sent(plan)["messages"][0]["content"] for plan in plans] == ["One\u2028two\x85three?", "Four?"]


def test_conversations_end_before_the_first_answer_and_take_its_length(folder: Path) -> None:
    said = [("system", "Be brief."), ("human", "Is <image> like\n<image>?"), ("gpt", "no it is quite different"), ("human", "Why?")]
    record = {"image": ["images/0.png", "images/1.png"], "conversations": [{"from": who, "value": what} for who, what in said]}
    (plan,) = plans_of(folder, [record])
    system, user = sent(plan)["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    kinds = [part.get("text") or part["image_url"]["url"] for part in user["content"]]
    assert kinds == ["Is ", url_of(folder / "images/0.png"), " like\n", url_of(folder / "images/1.png"), "?"]
    assert plan.max_tokens == sent(plan)["max_tokens"] == 7  # five words
    assert plans_of(folder, [record], max_tokens=3, own_output=True)[0].max_tokens == 3


def test_messages_of_the_api_and_of_batch_files(folder: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": "images/1.png"}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
    for record in (body, {"custom_id": "1", "url": "/v1/chat/completions", "body": body}):
        (plan,) = plans_of(folder, [record])
        (message,) = sent(plan)["messages"]
        assert message["content"] == [{"type": "image_url", "image_url": {"url": url_of(folder / "images/1.png")}}, content[1]]
        assert (plan.max_tokens, plan.group, plan.traced[0].height) == (9, "image", 40)


def test_requests_are_drawn_by_seed_and_come_again_when_more_are_asked_for(folder: Path) -> None:
    records = [{"prompt": f"question {number}"} for number in range(20)]

    def texts(**options: Any) -> list[str]:
        return [sent(plan)["messages"][0]["content"] for plan in plans_of(folder, records, **options)]

    assert texts() == [record["prompt"] for record in records]
    assert texts(num_requests=8, seed=1) == texts(num_requests=8, seed=1) != texts(num_requests=8, seed=2)
    assert len(set(texts(num_requests=8))) == 8
    more = texts(num_requests=45)
    assert more[:20] == more[20:40] and sorted(more[:20]) == sorted(texts())


def test_arrivals_of_a_trace_or_a_rate(folder: Path) -> None:
    records = [{"prompt": f"question {number}"} for number in range(4)]
    plans_of(folder, records)
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 500 * n, "input_length": 9, "output_length": 77}) + "\n" for n in range(3)))
    common = ["--dataset", str(folder / "set.json")]
    traced = plan_requests(parse_options([*common, "--trace", str(trace)]))
    assert [plan.arrival_s for plan in traced] == [0.0, 0.5, 1.0] and {plan.max_tokens for plan in traced} == {64}
    assert all(plan.messages for plan in traced)
    assert len({plan.arrival_s for plan in plan_requests(parse_options([*common, "--rate", "3"]))}) == 4


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "x"}, "no messages, conversations, prompt or question; there are text"),
        ({"prompt": "x", "image": "../secret.png"}, "'../secret.png' is outside of the data set's folder"),
        ({"prompt": "x", "image": "/etc/hostname"}, "is outside"),
        ({"prompt": "x", "image": "set.json"}, "'set.json' is no picture that can be read"),
        ({"prompt": "x", "image": "images/7.png"}, "No such file"),
        ({"prompt": "x", "image": 5}, "the image 5 is neither a path nor a URL"),
        ({"prompt": "<image><image>", "image": "images/0.png"}, "2 marks of media, and 1 media"),
        ({"prompt": "<image> and", "images": ["images/0.png", "images/1.png"]}, "1 media have no place"),
        ({"prompt": 7}, "content 7 must be a text"),
        ({"messages": "x"}, "messages must be a list of objects"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role 'tool'"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no question of a user"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens 0 must be a whole number from 1"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens True must be"),
        (7, "a record is an object, this is int"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_place(folder: Path, record: Any, says: str) -> None:
    with pytest.raises(ValueError, match="set.json:3: ") as error:
        plans_of(folder, [{"prompt": "fine"}, record])
    assert says in str(error.value)


@pytest.mark.parametrize(("text", "says"), [("", "holds no requests"), ("[1", "not JSON"), ('{"prompt": "x"}\n{', ":2: not JSON")])
def test_files_that_are_no_data_set(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        plan_dataset(file, None, 0, 64, False)


@pytest.mark.parametrize("option", [["--modality", "image"], ["--workload", "pope"], ["--input-tokens", "5"], ["--token-share", "0.5"]])
def test_options_of_generated_requests_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--dataset", "set.json", *option])
    assert "--dataset set.json has requests of its own" in capsys.readouterr().err
