"""decode's thread for grammars: what it keeps and forgets, and when a process may copy the vocabulary first."""

import threading
from pathlib import Path
from typing import Any

import pytest

from mmrt.actors.decode.grammar_compiler import _MAX_DONE, GrammarCompiler
from mmrt.actors.decode.loop import has_time
from mmrt.models.architecture import ModelConfig
from mmrt.models.errors import GrammarError
from mmrt.models.grammar.matcher import Matcher, Matchers
from mmrt.models.grammar.vocabulary import load_vocabulary
from mmrt.runtime.config.runtime_config import RuntimeConfig
from mmrt.runtime.process.memory_layout import plan_layout, write_layout
from mmrt.schema.rows import Phase
from mmrt.shm.role_lock import RoleLock
from mmrt.tests.actors.bench import Bench, Weights
from mmrt.tests.actors.host.fake_actor import FakeActor
from mmrt.tests.runtime.process.test_memory_layout import FACTS


class Compiling:
    """A compiler, and what its thread says."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._woken = threading.Semaphore(0)
        self.compiler = GrammarCompiler(lambda: Matchers(load_vocabulary(path, config)), self._woken.release)

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._woken.acquire(timeout=30)

    def begin(self, grammar: str) -> Matcher | None:
        assert self.compiler.begin(grammar) is None
        self.wait()
        return self.compiler.begin(grammar)


@pytest.fixture
def compiling(checkpoint: Path, tiny: tuple[ModelConfig, Weights]) -> Any:
    made = Compiling(checkpoint, tiny[0])
    yield made
    made.compiler.close()


def test_a_grammar_is_compiled_once_and_kept(compiling: Compiling) -> None:
    compiler = compiling.compiler
    assert not compiler.take_news()
    assert compiling.begin('start: "a"') is not None
    assert compiler.take_news() and not compiler.take_news()
    again = compiler.begin('start: "a"')
    assert again is not None and again.count == 0
    assert not compiler.take_news()


def test_an_error_comes_to_the_row_that_asks(compiling: Compiling) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiling.begin("start: (")
    assert compiling.begin('start: "b"') is not None


def test_what_nobody_asks_for_any_more_is_forgotten(compiling: Compiling) -> None:
    grammars = [f'start: "{number}"' for number in range(_MAX_DONE + 9)]
    for grammar in grammars:
        assert compiling.compiler.begin(grammar) is None
    compiling.wait(len(grammars))
    compiling.begin("start: /a/")
    assert len(compiling.compiler._jobs) == _MAX_DONE
    assert compiling.compiler.begin(grammars[-1]) is not None and compiling.compiler.begin(grammars[0]) is None


def test_a_vocabulary_that_cannot_be_copied_is_an_error_of_the_row(tmp_path: Path, tiny: tuple[ModelConfig, Weights]) -> None:
    made = Compiling(tmp_path, tiny[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
            made.begin('start: "a"')
    made.compiler.close()


def test_the_vocabulary_waits_only_where_streams_do(counting: Bench) -> None:
    actor: Any = FakeActor(counting.run, "decode", [])
    row = counting.place([5])
    counting.table.set_phase(row.row, Phase.DECODE)
    assert has_time(actor), "the run's first process"
    write_layout(counting.run.path, plan_layout(RuntimeConfig(), FACTS, "float32"))
    assert not has_time(actor), "the last process has died"
    with RoleLock(counting.run, "decode") as role:
        assert role.try_acquire() and has_time(actor), "the predecessor serves"
    counting.table.set_phase(row.row, Phase.PREPARE)
    assert has_time(actor)
