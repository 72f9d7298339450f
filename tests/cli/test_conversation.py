"""The turns and commands of ``mmrt chat``, and the reading of its lines."""

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from mmrt.cli.chat import _read_question
from mmrt.cli.conversation import COMMANDS, Conversation
from mmrt.cli.line_editor import _completion, piped_lines
from mmrt.cli.terminal import printable
from mmrt.runtime.errors import UserError

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("i.png", "a b.png", "it's.png", "-"):
        (tmp_path / name).write_bytes(b"png")
    (tmp_path / "a.mp3").write_bytes(b"mp3")
    (tmp_path / "empty.png").touch()
    return tmp_path


def messages(conversation: Conversation) -> Any:
    return conversation.body("m")["messages"]


def test_turns_are_kept() -> None:
    conversation = Conversation({"seed": 1}, system="Be brief.")
    assert conversation.take("Hi").asks
    conversation.answer("Hello.")
    assert conversation.take("And?").asks
    assert conversation.body("m") == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "And?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 1,
    }


@pytest.mark.parametrize("line", ["", "  ", "\t"])
def test_empty_lines_ask_nothing(line: str) -> None:
    assert not Conversation({}).take(line).asks


@pytest.mark.parametrize(
    "line, question",
    [
        ("/image i.png What's this?", "What's this?"),
        ("/image   i.png\tWhat?", "What?"),
        ("/image a\\ b.png What?", "What?"),
        ("/image 'a b.png' What?", "What?"),
        ('/image "a b.png" What?', "What?"),
        ("/image ~/i.png What?", "What?"),
        ("/image it\\'s.png What?", "What?"),
        ("/image - What?", "What?"),
        (f"/image i.png {'x' * 5000}", "x" * 5000),
    ],
)
def test_an_image_and_a_question_in_one_line(files: Path, line: str, question: str) -> None:
    conversation = Conversation({})
    assert conversation.take(line).asks
    ((image, text),) = [turn["content"] for turn in messages(conversation)]
    assert text == {"type": "text", "text": question}
    assert image["type"] == "image_url" and image["image_url"]["url"].endswith(",cG5n")


def test_media_wait_for_the_next_question(files: Path) -> None:
    conversation = Conversation({})
    assert conversation.take("/image a b.png").told == "attached: a b.png"  # a name that exists needs no quotes
    assert conversation.take("/audio a.mp3").told == "attached: a b.png, a.mp3"
    assert conversation.take("What?").asks
    (turn,) = messages(conversation)
    assert turn["content"] == [
        IMAGE, {"type": "input_audio", "input_audio": {"data": "bXAz", "format": "mp3"}}, {"type": "text", "text": "What?"},
    ]  # fmt: skip
    conversation.answer("A.")
    conversation.take("And now?")
    assert messages(conversation)[-1]["content"] == "And now?"


def test_an_empty_line_asks_about_attached_media_alone(files: Path) -> None:
    conversation = Conversation({})
    conversation.take("/image i.png")
    assert conversation.take("").asks and messages(conversation) == [{"role": "user", "content": [IMAGE]}]


@pytest.mark.parametrize(
    "line, message",
    [
        ("/image", "/image needs a file: /image FILE [QUESTION]"),
        ("/image no.png", "cannot read no.png: No such file or directory"),
        ("/image empty.png", "empty.png is empty"),
        ("/video .", "cannot read .: Is a directory"),
        ("/image 'no end", "no closing quotation"),
        ("/image https://x/y.png", "https://x/y.png: URLs are not supported"),
        ("/imag i.png", "no command /imag; did you mean /image? /help lists them, and //imag asks the model"),
        ("/frobnicate", "no command /frobnicate; /help lists them"),
        ("/clear all", "/clear takes nothing, and 'all' is given"),
        ("/again", "nothing has been asked yet"),
        ("/set stream false", "/set stream: the chat sets it itself"),
        ("/set messages []", "/set messages: the chat sets it itself"),
    ],
)
def test_commands_that_cannot_be_done(files: Path, line: str, message: str) -> None:
    conversation = Conversation({})
    with pytest.raises(UserError) as caught:
        conversation.take(line)
    assert message in str(caught.value)
    assert messages(conversation) == [] and not conversation.fields


@pytest.mark.parametrize("line, asked", [("/etc/passwd: what is it?", "/etc/passwd: what is it?"), ("//set", "/set"), ("/", "/")])
def test_a_slash_does_not_make_a_command(line: str, asked: str) -> None:
    conversation = Conversation({})
    assert conversation.take(line).asks and messages(conversation)[0]["content"] == asked


def test_fields() -> None:
    conversation = Conversation({})
    assert conversation.take("/set").told == "no field is set: the server's defaults count"
    assert conversation.take("/set temperature 0.5").told == "temperature = 0.5"
    conversation.take('/set stop ["a", "b"]')
    assert conversation.take("/set negative_prompt a dog").told.splitlines()[-1] == 'negative_prompt = "a dog"'
    assert conversation.fields == {"temperature": 0.5, "stop": ["a", "b"], "negative_prompt": "a dog"}
    conversation.take("/set stop")
    assert "stop" not in conversation.body("m") and conversation.body("m")["temperature"] == 0.5


def test_the_system_prompt() -> None:
    conversation = Conversation({})
    conversation.take("/system Be brief.")
    conversation.take("Hi")
    assert messages(conversation)[0] == {"role": "system", "content": "Be brief."}
    conversation.take("/system")
    assert [turn["role"] for turn in messages(conversation)] == ["user"]


def test_again_after_an_answer_and_after_none() -> None:
    conversation = Conversation({})
    conversation.take("One")
    conversation.answer("1")
    assert conversation.take("/again").asks
    assert messages(conversation) == [{"role": "user", "content": "One"}]
    conversation.withdraw()
    assert messages(conversation) == []
    assert conversation.take("/again").asks and messages(conversation) == [{"role": "user", "content": "One"}]
    conversation.withdraw()
    conversation.take("Two")
    conversation.answer("2")
    conversation.take("/again")
    assert messages(conversation) == [{"role": "user", "content": "Two"}]


def test_settle_takes_out_a_question_only() -> None:
    conversation = Conversation({})
    conversation.settle()
    conversation.take("One")
    conversation.answer("1")
    conversation.settle()
    assert len(messages(conversation)) == 2
    conversation.take("Two")
    conversation.settle()
    assert len(messages(conversation)) == 2


def test_clear_help_and_quit(files: Path) -> None:
    conversation = Conversation({"seed": 1})
    conversation.take("/image i.png")
    conversation.take("Hi")
    conversation.answer("Hello")
    conversation.take("/image i.png")
    conversation.take("/clear")
    conversation.take("Hi")
    assert messages(conversation) == [{"role": "user", "content": "Hi"}] and conversation.fields == {"seed": 1}
    told = conversation.take("/help").told
    assert all(f"/{name}" in told and purpose in told for name, (_, purpose) in COMMANDS.items())
    assert told == conversation.take("/?").told
    for line in ("/quit", "/bye", "/exit"):
        assert conversation.take(line).ends


def reader(*lines: str) -> Any:
    left = list(lines)
    return lambda prompt: left.pop(0) if left else None


@pytest.mark.parametrize(
    "lines, question",
    [
        (["a"], "a"),
        ([], None),
        (['"""a', "", 'b"""'], "a\n\nb"),
        (['"""', "a", '"""'], "a"),
        (['"""a"""'], "a"),
        (['"""a', "b"], "a\nb"),
    ],
)
def test_questions_of_several_lines(lines: list[str], question: str | None) -> None:
    assert _read_question(reader(*lines)) == question


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\r\n\nb\xff"), "utf-8"))
    assert [piped_lines(""), piped_lines(""), piped_lines(""), piped_lines("")] == ["a", "", "b\ufffd", None]


def test_completion(files: Path) -> None:
    commands = [f"/{name}" for name in COMMANDS]
    (files / "sub").mkdir()

    def completions(line: str) -> list[str]:
        text = line.split()[-1] if not line.endswith(" ") else ""
        found = []
        while (one := _completion(line, text, len(found), commands)) is not None:
            found.append(one)
        return found

    assert completions("/s") == ["/system ", "/set ", "/save ", "/stats "]
    assert completions("/image i") == ["i.png", "it's.png"]
    assert completions("/image su") == ["sub/"] and completions("/image ~/i.p") == [str(files / "i.png")]
    assert completions("hel") == [] and completions("/image [") == []


def test_history_is_its_users_alone_and_bounded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    from mmrt.cli import line_editor

    monkeypatch.setattr(line_editor, "HISTORY_LINES", 3)
    path = files / "state" / "chat_history"
    readline.clear_history()
    remember = line_editor._prepare(path, ["/help"])
    for line in ("one", "two", "three", "four"):
        readline.add_history(line)
        remember()
    assert path.read_text().splitlines() == ["one", "two", "three", "four"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    readline.clear_history()
    line_editor._prepare(path, ["/help"])
    assert path.read_text().splitlines() == ["two", "three", "four"] and stat.S_IMODE(path.stat().st_mode) == 0o600
    readline.clear_history()
    readline.set_completer(None)


def test_a_history_that_cannot_be_kept_is_no_failure(files: Path) -> None:
    pytest.importorskip("readline")
    from mmrt.cli import line_editor

    (files / "file").touch()
    line_editor._prepare(files / "file" / "chat_history", ["/help"])()


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2J\x7f\r\n\tä😀") == "a\u241b]0;title\u2407b\ufffd2J\u2421\n\tä😀"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 0.2", "/set temprature: the server has no such field; did you mean temperature?"),
        ("/set zzz 1", "/set zzz: the server has no such field"),
        ("/stats now", "/stats takes nothing"),
        ("/stat", "no command /stat; did you mean /stats?"),
        ("/save", "/save needs a file: /save FILE"),
        ("/load a b", "/load takes a file, and 'b' follows it"),
        ("/load none.json", "cannot read none.json: No such file"),
        ("/load i.png", "i.png is no saved conversation: JSON is malformed"),
        ("/load role.json", "role.json is no saved conversation: Invalid enum value 'tool'"),
        ("/load own.json", "own.json sets messages, model, stream in its fields, which the chat sets itself: take that out"),
        ("/load shown.json", "shown.json is no saved conversation: its system prompt has parts that are no text"),
        ("/load untyped.json", "untyped.json is no saved conversation: its system prompt has parts that are no text"),
        ("/load /dev/zero", "/dev/zero is no saved conversation"),
        ("/save i.png", "cannot write i.png: File exists"),
        ("/save /no/such/file", "cannot write /no/such/file: No such file"),
    ],
)
def test_lines_that_are_refused_at_once_change_nothing(files: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    monkeypatch.setattr("mmrt.cli.conversation.MAX_SAVED_BYTES", 1 << 20)
    (files / "role.json").write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    fields = {"messages": [], "model": "zzz", "stream": False, "seed": 2}
    (files / "own.json").write_text(json.dumps({"messages": [], "fields": fields}))
    for name, part in (("shown", IMAGE), ("untyped", {"text": "x"})):
        (files / f"{name}.json").write_text(json.dumps({"messages": [{"role": "system", "content": [part]}]}))
    conversation = Conversation({"seed": 1}, "Be brief.", lambda: {"temperature", "seed"})
    with pytest.raises(UserError) as refusal:
        conversation.take(line)
    assert said in str(refusal.value)
    assert (conversation.fields, conversation.system, conversation.turns) == ({"seed": 1}, "Be brief.", [])
    assert (files / "i.png").read_bytes() == b"png"


def test_a_conversation_is_saved_and_loaded(files: Path) -> None:
    conversation = Conversation({"seed": 1}, "Be brief.", lambda: {"seed"})
    assert conversation.take("/image i.png What is it?").asks
    conversation.answer("Red. \u00e9")
    assert conversation.take("/save talk.json").told == "2 turns are in talk.json"
    assert stat.S_IMODE((files / "talk.json").stat().st_mode) == 0o600
    other = Conversation({})
    assert other.take("/load talk.json").told == "2 turns of talk.json; the next question goes on"
    assert other.body("m") == conversation.body("m")
    other.take("And?")
    other.answer("Blue.")
    assert other.take("/save talk.json").told == "4 turns are in talk.json", "its own file is replaced"
    with pytest.raises(UserError, match="File exists"):
        Conversation({}).take("/save talk.json")


def test_a_system_prompt_of_parts_is_loaded_as_their_text(files: Path) -> None:
    content = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    (files / "talk.json").write_text(json.dumps({"messages": [{"role": "system", "content": content}]}))
    conversation = Conversation({})
    conversation.take("/load talk.json")
    assert conversation.system == "Be brief.\nBe kind."


def test_fields_that_nobody_lists_can_be_set() -> None:
    conversation = Conversation({"seed": 1}, known_fields=lambda: {"temperature"})
    assert conversation.take("/set seed 2").told == "seed = 2", "an option of the command is no mistake"
    assert Conversation({}).take("/set anything 2").told == "anything = 2", "the server does not say"
