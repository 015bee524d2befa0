"""Exploration of every order in which the partitions of a Gluon kernel and its copies may run.

`explore` takes the traces that `gluon_machine.py` records, and visits each reachable state once.  A
product may read its operands at any time until the wait for it, and a copy may finish at any time
after it was issued.

A partition is one thread here.  The four warps of a consumer synchronize before one of them arrives
at a barrier for all of them; the tests of the compiled code check this.
"""

# Note [Partial order reduction]
# A move of a partition may contain several of its operations.  The omitted orders contain no other
# errors, for the following reasons.
# - A load or product never waits, so it follows the partition's previous operation at once.  If a
#   later load or product would fail because of an operation of another partition, that operation
#   fails after the early load or product: the buffer is in use, or it has no contents.
# - The end of a product or of a copy to global memory only allows more operations, so it happens
#   at the latest time: together with the partition's next operation.
AT_ONCE = frozenset(("load", "mma"))
AT_LAST = frozenset(("retire", "sent"))


def explore(traces, arrivals):
    """Return the number of states; raise RuntimeError for the first invalid state.

    A state consists of the position of each partition, the barriers, the copies in flight, the
    contents of each piece of shared memory, and the products that may still be reading.
    """
    bars = {name: i for i, name in enumerate(arrivals)}
    counts = tuple(arrivals.values())
    buffer_index = {"load": 2, "write": 1, "read": 1}
    used = {op[buffer_index[op[0]]] for trace in traces for op in trace if op[0] in buffer_index}
    buffers = {name: i for i, name in enumerate(sorted(used, key=str))}
    # Data written before the partitions started is present.
    first = {op[1]: op[2] for trace in traces for op in reversed(trace) if op[0] == "read"}
    written = {
        op[buffer_index[op[0]]] for trace in traces for op in trace if op[0] in ("load", "write")
    }
    start = (
        (0,) * len(traces), tuple((0, n, 0) for n in counts), frozenset(),
        tuple(None if name in written else first[name] for name in buffers), ((),) * len(traces),
    )  # fmt: skip
    known, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        moves = [*_iter_next_states(state, traces, bars, counts, buffers)]
        at, _, flying, _, readers = state
        if not moves:
            stuck = [t[i] for t, i in zip(traces, at, strict=True) if i < len(t)]
            if stuck:
                raise RuntimeError(f"a deadlock: {stuck}")
            if flying or any(readers):
                raise RuntimeError(f"the program ends before {flying or readers}")
        for state in moves:
            if state not in known:
                known.add(state)
                waiting.append(state)
    return len(known)


def _iter_next_states(state, traces, bars, counts, buffers):
    """Yield every state that may follow."""
    at, barriers, flying, contents, readers = state
    for copy in flying:
        _, barrier, buffer, content, size = copy
        i = bars[barrier]
        parity, missing, open_bytes = barriers[i]
        yield (
            at,
            _replace_item(
                barriers, i, advance_barrier((parity, missing, open_bytes - size), counts[i])
            ),
            flying - {copy},
            _replace_item(contents, buffers[buffer], content),
            readers,
        )
    for who, trace in enumerate(traces):
        if at[who] < len(trace):
            moved = _run(trace, who, state, bars, counts, buffers)
            if moved is not None:
                yield moved


def _run(trace, who, state, bars, counts, buffers):
    """Return the state after the next operations of a partition, or None if it must wait.

    See Note [Partial order reduction].
    """
    i = state[0][who]
    is_at_last = True
    while i < len(trace) and (is_at_last or trace[i][0] in AT_ONCE):
        op = trace[i]
        rest = STEPS[op[0]](op, who, state, bars, counts, buffers)
        if rest is None:
            return None
        i += 1
        state = _replace_item(state[0], who, i), *rest
        is_at_last = is_at_last and op[0] in AT_LAST
    return state


# Each of the following functions executes one operation of a partition.  It returns the state
# without the positions, or None if the partition must wait.


def _wait(op, who, state, bars, counts, buffers):
    return None if state[1][bars[op[1]]][0] == op[2] else state[1:]


def _arrive(op, who, state, bars, counts, buffers):
    _, barriers, *others = state
    i = bars[op[1]]
    parity, missing, size = barriers[i]
    arriving, more = (1, op[2]) if op[0] == "expect" else (op[2], 0)
    if arriving > missing:
        raise RuntimeError(f"{op[1]} is arrived at once too often")
    return _replace_item(
        barriers, i, advance_barrier((parity, missing - arriving, size + more), counts[i])
    ), *others


def _load(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    _require_unused(op[2], state, f"{op[3]} is loaded over it")
    return barriers, flying | {op}, _replace_item(contents, buffers[op[2]], None), readers


def _issue_mma(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    for buffer, content in op[1]:
        _require_content(buffer, content, contents[buffers[buffer]])
    group = ("mma", *(buffer for buffer, _ in op[1]))
    return barriers, flying, contents, _replace_item(readers, who, (*readers[who], group))


def _read(op, who, state, bars, counts, buffers):
    # A partition sees its own writes without a fence.
    content = state[3][buffers[op[1]]]
    is_own_write = content and content[:2] == ("hidden", who)
    _require_content(op[1], op[2], content[2] if is_own_write else content)
    return state[1:]


def _retire(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    groups = readers[who]
    products = [i for i, group in enumerate(groups) if group[0] == "mma"]
    running = products[-op[1] or len(groups) :]
    remaining = tuple(g for i, g in enumerate(groups) if g[0] == "send" or i in running)
    return barriers, flying, contents, _replace_item(readers, who, remaining)


def _write(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    _require_unused(op[1], state, "it is written to")
    contents = _replace_item(contents, buffers[op[1]], ("hidden", who, op[2]))
    return barriers, flying, contents, readers


def _fence(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    visible = tuple(x[2] if x and x[:2] == ("hidden", who) else x for x in contents)
    return barriers, flying, visible, readers


def _send(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    if contents[buffers[op[1]]][0] != "made":
        raise RuntimeError(f"{op[1]} is sent without a fence after the write")
    return barriers, flying, contents, _replace_item(readers, who, (*readers[who], ("send", op[1])))


def _complete_sending(op, who, state, bars, counts, buffers):
    _, barriers, flying, contents, readers = state
    remaining = tuple(group for group in readers[who] if group[0] == "mma")
    return barriers, flying, contents, _replace_item(readers, who, remaining)


STEPS = {
    "wait": _wait,
    "expect": _arrive,
    "arrive": _arrive,
    "load": _load,
    "mma": _issue_mma,
    "read": _read,
    "retire": _retire,
    "write": _write,
    "fence": _fence,
    "send": _send,
    "sent": _complete_sending,
}


def _require_content(buffer, content, actual):
    if actual != content:
        raise RuntimeError(f"{buffer} is read for {content} while it holds {actual}")


def _require_unused(buffer, state, what):
    _, _, flying, _, readers = state
    if any(buffer in group[1:] for groups in readers for group in groups):
        raise RuntimeError(f"{buffer} is still being read when {what}")
    if any(copy[2] == buffer for copy in flying):
        raise RuntimeError(f"{buffer} is still being loaded when {what}")


def _replace_item(items, i, item):
    return (*items[:i], item, *items[i + 1 :])


def advance_barrier(state, count):
    """Return a barrier's parity, missing arrivals and bytes after its phase may have ended."""
    parity, missing, size = state
    return (parity ^ 1, count, 0) if missing == 0 and size == 0 else state
