"""Every order in which the partitions of a Gluon kernel and its copies could happen.

`explore` takes the traces that `gluon_machine.py` wrote down, and visits each state that any order
leads to, once.  A product may read its operands at any time until it was waited for, and a copy may
arrive at any time after it was ordered.

A partition is one thread here, though a consumer has four warps: those meet before one of them
arrives at a barrier for all, which the compiled code is held to.
"""


def explore(traces, arrivals):
    """How many states there are; RuntimeError names the first in which something is wrong.

    A state is where each partition stands, each barrier, the copies on their way, what lies in each
    piece of shared memory, and the products that may still be reading.
    """
    bars = {name: i for i, name in enumerate(arrivals)}
    counts = tuple(arrivals.values())
    place = {"load": 2, "write": 1, "read": 1}
    used = {op[place[op[0]]] for trace in traces for op in trace if op[0] in place}
    buffers = {name: i for i, name in enumerate(sorted(used, key=str))}
    # What was written before the partitions started is there.
    first = {op[1]: op[2] for trace in traces for op in reversed(trace) if op[0] == "read"}
    written = {op[place[op[0]]] for trace in traces for op in trace if op[0] in ("load", "write")}
    start = (
        (0,) * len(traces), tuple((0, n, 0) for n in counts), frozenset(),
        tuple(None if name in written else first[name] for name in buffers), ((),) * len(traces),
    )  # fmt: skip
    known, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        moves = [*_moves(state, traces, bars, counts, buffers)]
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


def _moves(state, traces, bars, counts, buffers):
    """Every state that may follow."""
    at, barriers, flying, contents, readers = state
    for copy in flying:
        _, barrier, buffer, content, size = copy
        i = bars[barrier]
        parity, missing, open_bytes = barriers[i]
        yield (
            at, _with(barriers, i, after((parity, missing, open_bytes - size), counts[i])),
            flying - {copy}, _with(contents, buffers[buffer], content), readers,
        )  # fmt: skip
    for who, trace in enumerate(traces):
        if at[who] == len(trace):
            continue
        op, kind = trace[at[who]], trace[at[who]][0]
        here, now, sky, memory, reading = _with(at, who, at[who] + 1), *state[1:]
        mine = readers[who]
        if kind == "wait":
            if barriers[bars[op[1]]][0] == op[2]:
                continue
        elif kind in ("expect", "arrive"):
            i = bars[op[1]]
            parity, missing, size = barriers[i]
            arriving, more = (1, op[2]) if kind == "expect" else (op[2], 0)
            if arriving > missing:
                raise RuntimeError(f"{op[1]} is arrived at once too often")
            now = _with(barriers, i, after((parity, missing - arriving, size + more), counts[i]))
        elif kind == "load":
            _not_in_use(op[2], state, f"{op[3]} is loaded over it")
            sky = flying | {op}
            memory = _with(contents, buffers[op[2]], None)
        elif kind == "mma":
            for buffer, content in op[1]:
                _holds(buffer, content, contents[buffers[buffer]])
            reading = _with(readers, who, (*mine, ("mma", *(buffer for buffer, _ in op[1]))))
        elif kind == "read":
            # By the partition itself, that sees what it wrote without a fence.
            held = contents[buffers[op[1]]]
            _holds(op[1], op[2], held[2] if held and held[:2] == ("hidden", who) else held)
        elif kind == "retire":
            left = [i for i, group in enumerate(mine) if group[0] == "mma"][-op[1] or len(mine) :]
            kept = (g for i, g in enumerate(mine) if g[0] == "send" or i in left)
            reading = _with(readers, who, (*kept,))
        elif kind == "write":
            _not_in_use(op[1], state, "it is written to")
            memory = _with(contents, buffers[op[1]], ("hidden", who, op[2]))
        elif kind == "fence":
            memory = tuple(x[2] if x and x[:2] == ("hidden", who) else x for x in contents)
        elif kind == "send":
            if contents[buffers[op[1]]][0] != "made":
                raise RuntimeError(f"{op[1]} is sent without a fence behind what wrote it")
            reading = _with(readers, who, (*mine, ("send", op[1])))
        elif kind == "sent":
            reading = _with(readers, who, tuple(group for group in mine if group[0] == "mma"))
        else:
            raise AssertionError(op)
        yield here, now, sky, memory, reading


def _holds(buffer, content, held):
    if held != content:
        raise RuntimeError(f"{buffer} is read for {content} while it holds {held}")


def _not_in_use(buffer, state, what):
    _, _, flying, _, readers = state
    if any(buffer in group[1:] for groups in readers for group in groups):
        raise RuntimeError(f"{buffer} is still being read when {what}")
    if any(copy[2] == buffer for copy in flying):
        raise RuntimeError(f"{buffer} is still being loaded when {what}")


def _with(items, i, item):
    return (*items[:i], item, *items[i + 1 :])


def after(state, count):
    """A barrier's parity, missing arrivals and bytes, the phase ended where nothing is missing."""
    parity, missing, size = state
    return (parity ^ 1, count, 0) if missing == 0 and size == 0 else state
