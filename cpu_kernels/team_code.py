"""Machine code by which the threads of a team compute a kernel's parts (``team``), emitted with LLVM.

One word, the gate, says whether a call is open, which one it is, and how many helpers are at it. A helper enters an open call by
counting itself in, and computes parts until none is left. The leader does the same, closes the call, and waits for helpers that are
still at a part. So nobody waits for a helper that has not begun.

A thread that waits looks at the gate for ``SPIN_NS`` at most and then sleeps (futex). It sleeps at once where the thread for which it
waits was last on the same processor.
"""

from llvmlite import ir

from .machine_code import INT, POINTER, address, call_intrinsic, constant, load_word

# Words of a team's memory; those that different threads write are in different lines of a cache.
GATE = 0
FUNCTION, CALL, MOST_HELPERS, LEADER_CPU = 8, 9, 10, 11
NUM_ASLEEP = 16  # of helpers that sleep, or are about to
LEADER_SLEEPS, HELPER_CPU = 24, 25
NEXT_PART = 32
CLOCK_GETTIME, GET_CPU, SYSCALL, SPIN_NS = 40, 41, 42, 43
NUM_WORDS = 48

LEAD, HELP, END = range(3)

# The gate, from its lowest bit on: helpers at the call, open, the team ends, the call's number.
_HELPERS, _OPEN, _END, _ONE_CALL = (1 << 10) - 1, 1 << 10, 1 << 11, 1 << 12
_LOOKS = 8  # at the gate between two looks at the clock
_FUTEX, _WAIT, _WAKE = 202, 128, 129  # Linux's numbers: the system call, and its operations between threads of one process
_MONOTONIC = 1
_GATE = ir.IntType(32)


def team_module() -> ir.Module:
    """One global function (memory, what to do, function, call, most helpers): lead one call, help until the team ends, or end it."""
    module = ir.Module()
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, INT, POINTER, POINTER, INT]), "team")
    memory, what, *work = entry.args
    builder = ir.IRBuilder(entry.append_basic_block())
    for number, thread, arguments in ((LEAD, _Lead(module), work), (HELP, _Help(module), []), (END, _End(module), [])):
        with builder.if_then(builder.icmp_unsigned("==", what, constant(number))):
            builder.call(thread.function, [memory, *arguments])
    builder.ret_void()
    return module


class _Thread:
    """Emits what leader and helpers do. ``self.memory`` is the team's."""

    def __init__(self, module: ir.Module, name: str, arguments: list[ir.Type]) -> None:
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        self.function.linkage = "internal"
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.memory = self.function.args[0]
        self._time = self.builder.alloca(ir.ArrayType(INT, 2))  # struct timespec

    def place(self, word: int) -> ir.Value:
        return address(self.builder, self.memory, constant(word), INT)

    def word(self, index: int, kind: ir.Type = INT) -> ir.Value:
        return load_word(self.builder, self.memory, index, kind)

    def ticket(self, gate: ir.Value) -> ir.Value:
        """A leader sleeps at its call by this word, which none of the next million calls has."""
        return self.builder.or_(self.number(gate), _bits(1))

    def number(self, gate: ir.Value) -> ir.Value:
        """Of the gate's call."""
        return self.builder.and_(gate, _bits(-_ONE_CALL))

    def put(self, index: int, value: ir.Value) -> None:
        self.builder.store(value, self.place(index))

    def look(self, word: int) -> ir.Value:
        return self.builder.load_atomic(self.place(word), "seq_cst", 4, typ=_GATE)

    def change(self, operation: str, word: int, value: int | ir.Value) -> ir.Value:
        """Change 32 bits at once. Returns what they were."""
        bits = _bits(value) if isinstance(value, int) else value
        return self.builder.atomic_rmw(operation, self.place(word), bits, "seq_cst")

    def is_any(self, bits: ir.Value, mask: int) -> ir.Value:
        return self.builder.icmp_unsigned("!=", self.builder.and_(bits, _bits(mask)), _bits(0))

    def cpu(self) -> ir.Value:
        kind = ir.FunctionType(_GATE, []).as_pointer()
        return self.builder.zext(self.builder.call(self.word(GET_CPU, kind), []), INT)

    def now(self) -> ir.Value:
        """Nanoseconds."""
        kind = ir.FunctionType(_GATE, [_GATE, POINTER]).as_pointer()
        self.builder.call(self.word(CLOCK_GETTIME, kind), [_bits(_MONOTONIC), self._time])
        seconds, rest = (load_word(self.builder, self._time, index) for index in (0, 1))
        return self.builder.add(self.builder.mul(seconds, constant(10**9)), rest)

    def sleep(self, word: int, value: ir.Value) -> None:
        """Sleep while 32 bits are as they were. Wakes at times without a cause."""
        self._futex(word, _WAIT, self.builder.zext(value, INT))

    def wake(self, word: int, most: ir.Value) -> None:
        self._futex(word, _WAKE, most)

    def _futex(self, word: int, operation: int, value: ir.Value) -> None:
        kind = ir.FunctionType(INT, [INT, POINTER, INT, INT, INT]).as_pointer()
        arguments = [constant(_FUTEX), self.place(word), constant(operation), value, constant(0)]  # 0: without an end
        self.builder.call(self.word(SYSCALL, kind), arguments)

    def work(self) -> None:
        kind = ir.FunctionType(ir.VoidType(), [POINTER]).as_pointer()
        self.builder.call(self.word(FUNCTION, kind), [self.word(CALL, POINTER)])

    def watch(self, other_cpu: int, found: ir.Block) -> None:
        """Look at the gate until ``is_found``, then go to ``found``. Go on when the time for it is over, or at once where the thread
        that changes the gate was last on this processor."""
        builder = self.builder
        begin, again, late = (builder.append_basic_block() for _ in range(3))
        builder.cbranch(builder.icmp_unsigned("==", self.cpu(), self.word(other_cpu)), late, begin)
        builder.position_at_end(begin)
        end = builder.add(self.now(), self.word(SPIN_NS))
        builder.branch(again)
        builder.position_at_end(again)
        for _ in range(_LOOKS):
            following = builder.append_basic_block()
            builder.cbranch(self.is_found(self.look(GATE)), found, following)
            builder.position_at_end(following)
            call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        builder.cbranch(builder.icmp_signed("<", self.now(), end), again, late)
        builder.position_at_end(late)

    def is_found(self, gate: ir.Value) -> ir.Value:
        raise NotImplementedError


class _Lead(_Thread):
    """(memory, function, call, most helpers): one call."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "lead", [POINTER, POINTER, POINTER, INT])
        builder, (_, function, call, most) = self.builder, self.function.args
        words = {FUNCTION: function, CALL: call, MOST_HELPERS: most, LEADER_CPU: self.cpu(), NEXT_PART: constant(0)}
        for index, value in words.items():
            self.put(index, value)
        opened = builder.add(self.change("add", GATE, _ONE_CALL + _OPEN), _bits(_ONE_CALL))
        with builder.if_then(self.is_any(self.look(NUM_ASLEEP), -1)):
            self.wake(GATE, most)
        self.work()
        waits, again, asleep, left = (builder.append_basic_block() for _ in range(4))
        builder.cbranch(self.is_any(self.change("sub", GATE, _OPEN), _HELPERS), waits, left)
        builder.position_at_end(waits)
        self.watch(HELPER_CPU, left)
        builder.branch(again)
        builder.position_at_end(again)
        self.change("xchg", LEADER_SLEEPS, self.ticket(opened))
        builder.cbranch(self.is_found(self.look(GATE)), left, asleep)
        builder.position_at_end(asleep)
        self.sleep(LEADER_SLEEPS, self.ticket(opened))
        builder.branch(again)
        builder.position_at_end(left)
        self.change("xchg", LEADER_SLEEPS, 0)
        builder.ret_void()

    def is_found(self, gate: ir.Value) -> ir.Value:
        """No helper is at the call."""
        return self.builder.not_(self.is_any(gate, _HELPERS))


class _Help(_Thread):
    """(memory): all calls, unless there are as many helpers at one as it wants."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "help", [POINTER])
        builder = self.builder
        self._seen = builder.alloca(_GATE)  # the number of the last call that it was at
        builder.store(_bits(0), self._seen)
        begin, check, enter, at_work, bed, end = (builder.append_basic_block() for _ in range(6))
        builder.branch(begin)

        builder.position_at_end(begin)
        gate = self.look(GATE)
        builder.cbranch(self.is_any(gate, _END), end, check)
        builder.position_at_end(check)
        builder.cbranch(self._is_open(gate), enter, bed)

        builder.position_at_end(enter)
        entered = builder.cmpxchg(self.place(GATE), gate, builder.add(gate, _bits(1)), "seq_cst")
        builder.cbranch(builder.extract_value(entered, 1), at_work, begin)
        builder.position_at_end(at_work)
        builder.store(self.number(gate), self._seen)
        self.put(HELPER_CPU, self.cpu())
        self.work()
        is_last = builder.icmp_unsigned("==", builder.and_(self.change("sub", GATE, 1), _bits(_HELPERS | _OPEN)), _bits(1))
        with builder.if_then(is_last):
            woken = builder.cmpxchg(self.place(LEADER_SLEEPS), self.ticket(gate), _bits(0), "seq_cst")
            with builder.if_then(builder.extract_value(woken, 1)):
                self.wake(LEADER_SLEEPS, constant(1))
        self.watch(LEADER_CPU, begin)
        builder.branch(bed)

        builder.position_at_end(bed)
        self.change("add", NUM_ASLEEP, 1)
        gate = self.look(GATE)
        with builder.if_then(builder.not_(self.is_found(gate))):
            self.sleep(GATE, gate)
        self.change("sub", NUM_ASLEEP, 1)
        builder.branch(begin)
        builder.position_at_end(end)
        builder.ret_void()

    def is_found(self, gate: ir.Value) -> ir.Value:
        """There is a call for this helper, or the team ends."""
        return self.builder.or_(self._is_open(gate), self.is_any(gate, _END))

    def _is_open(self, gate: ir.Value) -> ir.Value:
        builder = self.builder
        is_new = builder.icmp_unsigned("!=", self.number(gate), builder.load(self._seen, typ=_GATE))
        num_helpers = builder.zext(builder.and_(gate, _bits(_HELPERS)), INT)
        is_wanted = builder.icmp_signed("<", num_helpers, self.word(MOST_HELPERS))
        return builder.and_(builder.and_(self.is_any(gate, _OPEN), is_new), is_wanted)


class _End(_Thread):
    """(memory): no call follows."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "end", [POINTER])
        self.change("or", GATE, _END)
        self.wake(GATE, constant(_HELPERS))
        self.builder.ret_void()


def _bits(value: int) -> ir.Constant:
    return ir.Constant(_GATE, value)
