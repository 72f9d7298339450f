"""A model with recurrent states in real runs: its tokens are transformers', whoever is killed before whatever write.

The code of the actors is a copy in which the places before each write call ``visit``: by the schedule of a test the process then kills
itself. All that it has written by then stays, as after any kill -9.
"""

import json
import random
import secrets
import shutil
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from mmrt.models.state_layout import GRID
from mmrt.shm.controller_stats import ControllerStats
from mmrt.shm.run_directory import RunDirectory
from mmrt.tests.end_to_end.conftest import Server, also_slow, launching
from mmrt.tests.end_to_end.oracle import check_argmax
from mmrt.tests.end_to_end.test_prefix_cache import wait_for_stats
from mmrt.tests.end_to_end.test_text_families import PICTURE, TextOracle
from mmrt.tests.settings import examples

QUESTION = "What is the colour of the sky on a clear day in the north of the country where you were born? " * 2
OTHERS = ["Hi", "Tell me a long story. " * 20, "naïve café — ÿ 漢字 🙂"]

VISIT = """
import json
import os
import signal
from pathlib import Path

FOLDER = Path({folder!r})


def visit(place):
    try:
        kills = json.loads((FOLDER / "schedule").read_text()).get(place)
    except FileNotFoundError:
        return
    if kills:
        file = os.open(FOLDER / place, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        count = os.fstat(file).st_size
        os.close(file)
        if count in kills:
            os.kill(os.getpid(), signal.SIGKILL)
"""
PLACES = {  # of each file: the place's name, and the line before which it is, or after
    "models/lm/language_model.py": [
        ("layer of a chunk", "            if after_layer is not None and after_layer() is True:\n"),
        ("layer of a step", "            normed = layer.finish(layer.mixer.decode(normed), hidden, inputs=next(inputs))\n"),
    ],
    "actors/decode/running_set.py": [
        ("fold", "            self._model.fold(states.borders, states.full_rows, states.targets)\n"),
        ("after the fold", "            self._model.fold(states.borders, states.full_rows, states.targets)\n"),
        ("commit", "            self._commit(batch, answers)\n"),
        ("after the commit", "            self._commit(batch, answers)\n"),
    ],
    "actors/prefill.py": [("end of a plan", "        return Done()\n")],
    "actors/controller/io.py": [("effects", "        match effect:\n")],
    "actors/decode/page_copier.py": [
        ("copied page", "            yield num_bytes\n"),
        ("part of a state", "            place[start : start + len(part)] = part\n"),
        ("after a part of a state", "            place[start : start + len(part)] = part\n"),
    ],
}
SCHEDULES = {  # a state at a prompt's first border is made of nothing: deaths there harm nobody, so some come later
    "decode": {
        "layer of a step": [3, 90, 150],
        "fold": [1, 6],
        "after the fold": [2, 5, 8],
        "commit": [2, 9],
        "after the commit": [4, 20],
    },
    "prefill": {"layer of a chunk": [2, 6, 11], "end of a plan": [1, 3, 5]},
    "controller": {
        "SetStatePages": [1, 2, 5],
        "AppendPages": [2, 4],
        "SetPrefilled": [1, 2, 4],
        "WritePlan": [2],
        "ClearPlan": [1, 3],
        "SetOwner": [1],
        "SetPhase": [2, 5],
        "ClearPages": [1, 2],
    },
}

COPY_SCHEDULES = {  # a copy of a state has one part, and one of its log
    "decode": {"copied page": [2, 12], "part of a state": [1, 4, 8], "after a part of a state": [2, 6]},
    "prefill": {"layer of a chunk": [4, 9], "end of a plan": [2, 5]},
    "controller": {"SetSourceStatePages": [1, 3], "ClearSource": [1, 2], "WritePlan": [2, 5], "ClearPlan": [4]},
    "memory": {"part of a state": [1]},
}

CHAT_KILLS = {
    "decode": ["layer of a step", "fold", "commit"],
    "prefill": ["layer of a chunk", "end of a plan"],
    "controller": ["SetStatePages", "WritePlan", "SetPageKeys", "ClearPages"],
}


class Deaths:
    """The schedule of a run's processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, schedule: dict[str, list[int]]) -> None:
        for file in self.folder.iterdir():
            file.unlink()
        (self.folder / "new").write_text(json.dumps(schedule))
        (self.folder / "new").rename(self.folder / "schedule")

    def wait(self, place: str) -> None:
        """Wait until somebody has come there."""
        until_s = time.monotonic() + 30
        while not (self.folder / place).exists():
            assert time.monotonic() < until_s, f"nobody came to {place}"
            time.sleep(0.001)

    def check(self, schedule: dict[str, list[int]]) -> None:
        """Everybody has died that was to die."""
        for place, counts in schedule.items():
            visits = (self.folder / place).stat().st_size
            assert visits >= max(counts), f"{place}: {visits} visits"


@pytest.fixture(scope="module")
def deaths(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Deaths:
    folder = tmp_path_factory.mktemp("deaths")
    (source / "visits.py").write_text(VISIT.format(folder=str(folder)))
    for name, places in PLACES.items():
        text = (source / name).read_text()
        for place, line in places:
            assert text.count(line) == 1, f"{name} has {text.count(line)} of {line!r}"
            argument = "type(effect).__name__" if place == "effects" else repr(place)
            indent = line[: len(line) - len(line.lstrip())]
            visit = f"{indent}__import__('mmrt.visits', fromlist=['visit']).visit({argument})\n"
            text = text.replace(line, f"{line}{visit}" if place.startswith("after") else f"{visit}{line}")
        (source / name).write_text(text)
    return Deaths(folder)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    with launching(tmp_path_factory, checkpoints) as launch:
        yield lambda settings="", **options: launch("qwen3_5", settings, **options)


@pytest.fixture(scope="module", params=["E+P+D", *also_slow("E+P+2D", "EPD")])
def dying(request: pytest.FixtureRequest, start: Callable[..., Server], deaths: Deaths, source: Path) -> Server:
    settings = "[scheduling]\nprefill_budget_tokens = 32\n[memory]\nmax_sequences = 6\n"
    return start(f'{settings}[actors]\nlayout = "{request.param}"\n', source=source)


@pytest.fixture(scope="module")
def judge(checkpoints: Callable[[str], Path]) -> TextOracle:
    return TextOracle(checkpoints("qwen3_5"))


def answers(server: Server, question: str, **options: Any) -> list[list[int]]:
    """The ids of each choice."""
    found: dict[int, list[int]] = defaultdict(list)
    for chunk in server.stream(question, **options):
        for choice in chunk.choices:
            found[choice.index] += getattr(choice, "token_ids", None) or []
    return [found[number] for number in sorted(found)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda at=at, call=call: found.update({at: call()})) for at, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(calls))]


def check_guided(judge: TextOracle, question: str, ids: list[int], scale: float) -> None:
    """Each member of a pair has states of its own."""
    given, companion = (judge.logits(judge.ids_of(text), ids) for text in (question, ""))
    check_argmax(companion + scale * (given - companion), ids)


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


class Chat:
    """A conversation, by ids. Each turn waits until nobody holds what the one before it had."""

    def __init__(self, server: Server, judge: TextOracle, salt: str) -> None:
        self.server, self.judge, self.salt = server, judge, salt
        self.ids: list[int] = []
        self.num_known = 0  # tokens up to the last state of the last answer
        self.dice = random.Random(salt)

    def turn(self, num_tokens: int, max_tokens: int, *, twice: bool = False, **options: Any) -> int:
        """Ask with so many new tokens, and return how many tokens were cached. The answers are transformers', or, asked ``twice``, the
        ones without a cache."""
        wait_for_stats(self.server, lambda stats: not any(pool.used for pool in stats.pools.values()))
        prompt = [*self.ids, *(self.dice.randrange(200, 600) for _ in range(num_tokens))]
        found = self._ask(self.salt, prompt, max_tokens, **options)
        alone = self._ask(secrets.token_hex(8), prompt, max_tokens).choices[0].token_ids if twice else []
        for choice in found.choices:
            ids = choice.token_ids
            assert len(ids) == max_tokens
            if ids != alone:
                self.judge.check_greedy(prompt, ids)
        self.ids = [*prompt, *ids]
        self.num_known = (len(self.ids) - 1) // GRID * GRID
        usage = found.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return int(usage.prompt_tokens_details.cached_tokens or 0)

    def _ask(self, salt: str, prompt: list[int], max_tokens: int, **options: Any) -> Any:
        extra = {"return_token_ids": True, "cache_salt": salt, "ignore_eos": True}
        return self.server.client.completions.create(
            model=self.server.checkpoint.name, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra, **options
        )


def ask_everything(server: Server, judge: TextOracle, max_tokens: int) -> None:
    """A text, two choices, and a guidance pair at once; all tokens are transformers'."""
    options = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
    guided = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True, "guidance_scale": 1.5}}
    texts, choices, pairs = at_once(
        lambda: answers(server, QUESTION, **options),
        lambda: answers(server, OTHERS[0], n=2, **options),
        lambda: answers(server, QUESTION, **guided),
    )
    assert [len(ids) for ids in (*texts, *choices, *pairs)] == [max_tokens] * 4
    judge.check_greedy(judge.ids_of(QUESTION), texts[0])
    for ids in choices:
        judge.check_greedy(judge.ids_of(OTHERS[0]), ids)
    check_guided(judge, QUESTION, pairs[0], 1.5)


@pytest.mark.parametrize("victim", SCHEDULES)
def test_kills_before_every_write_change_nothing(dying: Server, deaths: Deaths, judge: TextOracle, victim: str) -> None:
    deaths.begin(SCHEDULES[victim])
    ask_everything(dying, judge, max_tokens=40)
    dying.wait_until_empty()
    deaths.check(SCHEDULES[victim])


@pytest.fixture(scope="module")
def apart(start: Callable[..., Server], deaths: Deaths, source: Path) -> Server:
    """A run whose prompts are prefilled on one device and decoded on another."""
    settings = "[scheduling]\nprefill_budget_tokens = 32\n[memory]\nmax_sequences = 6\n"
    layout = '[actors]\nlayout = "EP@left+D@right"\n[[devices]]\nname = "left"\n[[devices]]\nname = "right"\n'
    return start(settings + layout, source=source)


@pytest.mark.parametrize("victim", ["decode", "memory", *also_slow("prefill", "controller")])
def test_kills_while_states_are_copied_change_nothing(apart: Server, deaths: Deaths, judge: TextOracle, victim: str) -> None:
    before = metric(apart, "mmrt_kv_transferred_bytes_total")
    deaths.begin(COPY_SCHEDULES[victim])
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_everything, apart, judge, 40)
        if victim == "memory":
            deaths.wait("part of a state")
            apart.kill("memory")
        asking.result()
    apart.wait_until_empty()
    deaths.check(COPY_SCHEDULES[victim])
    assert metric(apart, "mmrt_kv_transferred_bytes_total") > before


def test_turns_go_on_behind_an_answer_of_another_device(apart: Server, deaths: Deaths, judge: TextOracle) -> None:
    """Prefill loads its pages and its last state, also when it is killed in each turn."""
    chat = Chat(apart, judge, "of two devices")
    assert chat.turn(50, 40) == 0
    for num_tokens, kills in ((20, {}), (30, {"end of a plan": [1]})):
        deaths.begin(kills)
        known = chat.num_known
        assert chat.turn(num_tokens, 30) == known


@pytest.mark.parametrize("victim", ["controller", *also_slow("decode", "prefill")])
def test_kills_in_every_turn_of_a_chat_change_nothing(dying: Server, deaths: Deaths, judge: TextOracle, victim: str) -> None:
    """Each turn goes on behind the last state of the one before it, at the places where the kills are."""
    chat, num_cached = Chat(dying, judge, f"{victim} dies"), 0
    for _ in range(examples(9)):
        deaths.begin({place: [1] for place in CHAT_KILLS[victim]})
        known, found = chat.num_known, chat.turn(37, 30)
        assert found % GRID == 0 and found <= known
        num_cached += found
        deaths.check({place: [1] for place in CHAT_KILLS[victim]})
    assert num_cached > 0


def check_eight_at_once(server: Server, judge: TextOracle) -> None:
    questions = [*OTHERS, QUESTION, *(f"{number} {QUESTION}" for number in range(4))]
    found = at_once(*(lambda question=question: answers(server, question) for question in questions))
    for question, (ids,) in zip(questions, found, strict=True):
        judge.check_greedy(judge.ids_of(question), ids)
    server.wait_until_empty()


def test_eight_at_once(dying: Server, judge: TextOracle) -> None:
    """Six of them run, and prefill takes several steps for each; nobody dies."""
    check_eight_at_once(dying, judge)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 40, 2048])
def test_eight_at_once_with_other_budgets(start: Callable[..., Server], judge: TextOracle, budget: int) -> None:
    server = start(f"[scheduling]\nprefill_budget_tokens = {budget}\n")
    check_eight_at_once(server, judge)
    assert {"state", "log"} <= server.status()["pools"].keys() and server.status()["pools"]["state"]["pages"] == 32 + 256
    server.down()


@pytest.mark.slow  # by day pairs wait in test_pairs_wait_for_states
def test_rows_wait_for_states_and_are_preempted(start: Callable[..., Server], judge: TextOracle) -> None:
    """Two pairs of which one can run, and more text than there are KV pages for."""
    server = start("[memory]\nmax_sequences = 3\nkv_tokens = 400\n[model]\nmax_context = 320\n")
    check_pairs_that_wait(server, judge, 2)
    options = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    for (ids,) in at_once(*(lambda: answers(server, QUESTION, **options) for _ in range(3))):
        judge.check_greedy(judge.ids_of(QUESTION), ids)
    assert metric(server, "mmrt_preemptions_total") > 0
    server.wait_until_empty()
    server.down()


def check_pairs_that_wait(server: Server, judge: TextOracle, count: int) -> None:
    """Send so many pairs at once that one must wait for another's end; send them again if one ended before the last came."""
    options = {"max_tokens": 150, "extra_body": {"ignore_eos": True, "guidance_scale": 1.5}}
    pairs: list[list[int]] = []
    has_waited = False
    with RunDirectory.attach(server.run_path) as run, closing(ControllerStats.attach(run)) as stats:
        for number in range(1, 6):
            threads = [threading.Thread(target=lambda: pairs.append(answers(server, QUESTION, **options)[0])) for _ in range(count)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                has_waited |= "states" in stats.read().waiting_for
                time.sleep(0.005)
            assert len(pairs) == number * count
            if has_waited:
                break
    assert has_waited, "a pair waits for states"
    for ids in {tuple(ids) for ids in pairs}:
        check_guided(judge, QUESTION, [*ids], 1.5)


@pytest.fixture(scope="module")
def text_alone(tmp_path_factory: pytest.TempPathFactory, checkpoints: Callable[[str], Path]) -> Iterator[Server]:
    """A run of the same model in a checkpoint whose configuration has no tower."""
    whole, path = checkpoints("qwen3_5"), tmp_path_factory.mktemp("text") / "text"
    shutil.copytree(whole, path)
    config = json.loads((whole / "config.json").read_text())["text_config"]
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32", "architectures": ["Qwen3_5ForCausalLM"]}))
    server = Server(tmp_path_factory.mktemp("run"), path, "[memory]\nmax_sequences = 5\n")
    server.up()
    yield server
    server.down()


def test_a_checkpoint_without_a_tower_is_served_as_text(text_alone: Server, judge: TextOracle) -> None:
    assert json.loads((text_alone.checkpoint / "config.json").read_text())["model_type"] == "qwen3_5_text"
    (ids,) = answers(text_alone, QUESTION)
    judge.check_greedy(judge.ids_of(QUESTION), ids)
    content: Any = [{"type": "text", "text": "What is this?"}, PICTURE]
    with pytest.raises(openai.BadRequestError, match="the model does not take image: a qwen3_5 model is served as text"):
        text_alone.chat(content)
    checked = text_alone.mmrt("model", "check", str(text_alone.checkpoint))
    assert checked.returncode == 0 and "not read    model.visual.* (45 tensors)\n" in checked.stdout


def test_pairs_wait_for_states(text_alone: Server, judge: TextOracle) -> None:
    check_pairs_that_wait(text_alone, judge, 3)


def test_the_start_says_how_many_run_at_once(text_alone: Server) -> None:
    log = text_alone.mmrt("logs", "controller").stdout
    assert "5 sequences run at once on a device, of which a guidance pair is two: memory.max_sequences" in log
    assert "the prefix cache keeps up to 256 recurrent states beside theirs" in log


def test_turns_go_on_behind_what_is_known(text_alone: Server, judge: TextOracle) -> None:
    chat = Chat(text_alone, judge, "chat")
    assert chat.turn(50, 40) == 0
    for num_tokens, max_tokens in ((20, 30), (1, 1), (70, 25), (16, 50)):
        known = chat.num_known
        assert chat.turn(num_tokens, max_tokens) == known
    known = chat.num_known
    assert chat.turn(61, 20, n=4) >= known
    again = Chat(text_alone, judge, "chat")
    assert again.turn(50, 30) == 48, "an equal prompt begins at the end of its last page"


def test_a_chat_goes_on_in_the_next_run(start: Callable[..., Server], judge: TextOracle, tmp_path: Path) -> None:
    """Its pages and its states are in files."""
    settings = f'[cache]\ndir = "{tmp_path / "pages"}"\n'
    chat = Chat(start(settings), judge, "saved")
    assert chat.turn(150, 40) == 0
    chat.server.wait_until_empty()
    chat.server.down()
    chat.server = start(settings)
    known = chat.num_known
    assert chat.turn(20, 30, n=2) == known


def test_chats_with_one_system_prompt_and_regenerated_answers(text_alone: Server, judge: TextOracle) -> None:
    system = {"role": "system", "content": "Be brief, be kind, be exact. " * 40}

    def cached(question: str) -> tuple[int, list[int]]:
        wait_for_stats(text_alone, lambda stats: not any(pool.used for pool in stats.pools.values()))
        messages = [system, {"role": "user", "content": question}]
        ids, used = [], 0
        for chunk in text_alone.stream(messages, extra_body={"cache_salt": "one"}, stream_options={"include_usage": True}):
            ids += [id for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []]
            used = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage else used
        prompt = judge.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found = list(judge.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        judge.check_greedy(found, ids)
        end = judge.tokenizer.eos_token_id
        return used, [(place + 1) // GRID * GRID for place, id in enumerate(found) if id == end]

    first, borders = cached(QUESTION)
    assert first == 0 and borders[0] > 256
    assert cached(OTHERS[0])[0] == borders[0], "the end of the system's message"
    assert cached(QUESTION)[0] == borders[-1], "the end of the user's"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "turns", "user", "answer", "keeps_thoughts"),
    [(400, 12, 80, 150, True), (400, 12, 80, 150, False), (4000, 4, 800, 150, True)],
    ids=["chat", "chat without its thoughts", "agent"],
)
def test_whole_conversations(
    start: Callable[..., Server], judge: TextOracle, first: int, turns: int, user: int, answer: int, keeps_thoughts: bool
) -> None:
    """Each turn prefills what is new, and a page at most."""
    server = start()
    chat = Chat(server, judge, "long")
    for number in range(turns):
        known, found = chat.num_known, chat.turn(user + (0 if number else first), answer, twice=True)
        assert found == known
        if not keeps_thoughts:
            length = len(chat.ids) - answer
            chat.ids = [*chat.ids[:length], *(chat.dice.randrange(200, 600) for _ in range(answer // 3))]
            chat.num_known = (length - 2) // GRID * GRID
    server.down()


def test_a_pooled_prompt(text_alone: Server, judge: TextOracle) -> None:
    """A row that is prefilled alone."""
    text = "Hi there, " * 30
    found = text_alone.client.embeddings.create(model=text_alone.checkpoint.name, input=text, encoding_format="float")
    theirs, ours = judge.hidden(list(judge.tokenizer(text)["input_ids"]))[-1], torch.tensor(found.data[0].embedding)
    assert float(ours @ theirs / ours.norm() / theirs.norm()) > 0.99999
    text_alone.wait_until_empty()
