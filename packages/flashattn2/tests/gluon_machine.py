"""A machine in Python that executes the Gluon kernels without a GPU.

`Machine` executes a kernel's own functions line by line: torch does their arithmetic, a thread
represents each partition of warps, and barriers count phases as Hopper's do.  The trace of a
partition lists its operations on barriers and shared memory in order: see `gluon_schedules.py`.
"""

import itertools
import math
import threading
from types import FunctionType, SimpleNamespace

import torch
from flashattn2.experimental import backward, forward
from flashattn2.kernels import tiles
from gluon_schedules import advance_barrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The names of the buffers that each kernel allocates, in order.
NAMES = {
    "forward_kernel": "q k v q_ready k_ready k_free v_ready v_free",
    "backward_kernel": "a b x y lse delta numbers resident_ready x_ready y_ready free ds dq",
}
PATIENCE_SECONDS = 60.0
# The contents of the modules before a machine replaces a kernel.
HOMES = {"forward_kernel": dict(vars(forward)), "backward_kernel": dict(vars(backward))}
BELOW = dict(vars(tiles))


class Machine:
    """A replacement of a kernel that executes its programs in Python."""

    def __init__(self, kernel):
        self.kernel, self.programs = kernel, []

    def __getitem__(self, grid):
        def launch(*args, num_warps, enable_fp_fusion, **flags):
            assert num_warps == {"forward_kernel": 4, "backward_kernel": 8}[self.kernel]
            for index in range(grid[0]):
                self.programs.append(Program(self.kernel, index, grid[0], args, flags))

        return launch


class Program:
    """One program of the grid, with the traces of its partitions and its barriers."""

    def __init__(self, kernel, index, programs, args, flags):
        self.lock = threading.Condition()
        self.local = threading.local()
        self.arrivals = {}
        self.barriers = {}
        self.contents = {}
        self.traces = []
        self.names, self.versions = iter(NAMES[kernel].split()), itertools.count()
        run = link_functions(self.language(index, programs), HOMES[kernel])[kernel]
        run(*(convert_argument(x, i) for i, x in enumerate(args)), **flags)

    def language(self, index, programs):
        """Return the module that the kernel uses as its language."""

        def both(of_tensors, of_numbers):
            return lambda a, b: (of_tensors if torch.is_tensor(a) else of_numbers)(a, b)

        gl = SimpleNamespace(
            program_id=lambda _: index,
            num_programs=lambda _: programs,
            minimum=both(torch.minimum, min),
            maximum=both(torch.maximum, max),
            cdiv=lambda a, b: -(-a // b),
            cast=lambda x, _: x,
            where=torch.where,
            exp2=torch.exp2,
            log2=torch.log2,
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            arange=lambda lo, hi, _: torch.arange(lo, hi),
            convert_layout=lambda x, _: x,
            bfloat16=torch.bfloat16,
            float16=torch.float16,
            inline_asm_elementwise=round_as_assembly,
            static_range=range,
            float32=torch.float32,
            int32=torch.int32,
            int64="barrier",
            NVMMASharedLayout=lambda *_, **__: None,
            SwizzledSharedLayout=lambda *_: None,
            BlockedLayout=lambda *_: None,
            SliceLayout=lambda *_: None,
            DotOperandLayout=lambda *_: None,
            NVMMADistributedLayout=lambda *_: None,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
            store=lambda pointer, value, mask: pointer.store(value, mask),
        )
        gl.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.init,
            wait=self.wait,
            arrive=self.arrive,
            expect=self.expect,
        )
        gl.tma = SimpleNamespace(store_wait=lambda _: self.note("sent"))
        gl.load_tile = self.load
        gl.store_tile = self.send
        gl.add_tile = self.add
        gl.warpgroup_mma, gl.warpgroup_mma_wait = self.mma, self.mma_wait
        gl.fence_async_shared = lambda: self.note("fence")
        return gl

    def allocate(self, dtype, shape, _):
        name = next(self.names)
        if dtype == "barrier":
            return Barrier((name,))
        return Shared(self, torch.empty(shape, dtype=dtype).fill_(UNWRITTEN[dtype]), (name,))

    def warp_specialize(self, partitions, warps, registers):
        assert [*warps] == [4] * (len(partitions) - 2) + [1]
        assert all(r % 8 == 0 for r in registers)
        self.traces = [[] for _ in partitions]
        self.failures = []
        threads = [
            threading.Thread(target=self.work, args=(i, *partition), daemon=True)
            for i, partition in enumerate(partitions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def work(self, which, function, args):
        self.local.trace, self.local.groups = self.traces[which], []
        try:
            # Grad mode is each thread's own.
            with torch.no_grad():
                function(*args)
        except Exception as error:
            self.failures.append(error)

    def note(self, *operation):
        # Before the partitions start there is one thread and nothing to race with.
        if hasattr(self.local, "trace"):
            self.local.trace.append(operation)

    def init(self, barrier, count):
        self.arrivals[barrier.name] = count
        self.barriers[barrier.name] = [0, count, 0]

    def expect(self, barrier, size):
        self.note("expect", barrier.name, size)
        self.change(barrier, -1, size)

    def arrive(self, barrier, count):
        self.note("arrive", barrier.name, count)
        self.change(barrier, -count, 0)

    def change(self, barrier, arrivals, size):
        with self.lock:
            state = self.barriers[barrier.name]
            self.barriers[barrier.name] = advance_barrier(
                (state[0], state[1] + arrivals, state[2] + size), self.arrivals[barrier.name]
            )
            self.lock.notify_all()

    def wait(self, barrier, parity):
        self.note("wait", barrier.name, parity)
        with self.lock:
            passed = self.lock.wait_for(
                lambda: self.barriers[barrier.name][0] != parity or self.failures, PATIENCE_SECONDS
            )
        if self.failures or not passed:
            raise RuntimeError(f"nobody ends the phase of {barrier.name}")

    def load(self, source, at, barrier, target):
        content = (source.name, *at)
        self.note("load", barrier.name, target.name, content, source.block_type.nbytes)
        target.data.copy_(source.read(at))
        self.contents[target.name] = content
        self.change(barrier, 0, -source.block_type.nbytes)

    def send(self, target, at, source):
        self.note("send", source.name)
        target.inside(at).copy_(source.data.view(target.block)[target.cut(at)])

    def add(self, target, at, source):
        self.note("send", source.name)
        target.inside(at).add_(source.data.view(target.block)[target.cut(at)])

    def mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        reads = [x for x in (a, b) if isinstance(x, Shared)]
        self.note("mma", tuple((x.name, self.contents.get(x.name)) for x in reads))
        product = Product(a, b, acc if use_acc else None)
        self.local.groups.append(product)
        return product

    def mma_wait(self, left, deps):
        """Wait for products; their operands are read as late as possible."""
        self.note("retire", left)
        groups = self.local.groups
        while len(groups) > left:
            groups.pop(0).compute()
        values = [x.value if isinstance(x, Product) else x for x in deps]
        assert all(x is not None for x in values), "a product is read before it was waited for"
        return values[0] if len(values) == 1 else tuple(values)


class Product:
    """A matrix product that was issued."""

    def __init__(self, a, b, acc):
        self.operands, self.value = (a, b, acc), None

    def compute(self):
        a, b, acc = self.operands
        a, b = (x.data if isinstance(x, Shared) else x for x in (a, b))
        self.value = a.float() @ b.float() + (0.0 if acc is None else acc)


class Barrier:
    """The name of a barrier; the program stores its phase."""

    def __init__(self, name):
        self.name = name

    def index(self, i):
        return Barrier((*self.name, i))


class Shared:
    """A view of a piece of shared memory."""

    def __init__(self, program, data, name):
        self.program = program
        self.data = data
        self.name = name
        self.dtype = data.dtype

    def index(self, i):
        return Shared(self.program, self.data[i], (*self.name, i))

    def reshape(self, shape):
        return Shared(self.program, self.data.view(*shape), self.name)

    def permute(self, order):
        return Shared(self.program, self.data.permute(*order), self.name)

    def store(self, value):
        content = ("made", next(self.program.versions))
        self.program.note("write", self.name, content)
        self.program.contents[self.name] = content
        self.data.copy_(value)

    def load(self, _):
        self.program.note("read", self.name, self.program.contents[self.name])
        return self.data.clone()


class Descriptor:
    """A TMA descriptor: loads return zeros outside of the tensor, and stores omit them."""

    def __init__(self, descriptor, name):
        self.base = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        self.block = descriptor.block_shape
        self.name = name
        self.dtype = descriptor.base.dtype
        self.layout = None
        size = math.prod(self.block) * descriptor.base.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def inside(self, at):
        # Rows may lie beyond the end, where TMA sees zeros; batch and head may not.
        assert all(0 <= i < n for i, n in zip(at[:-2], self.base.shape, strict=False))
        assert at[-2] >= 0
        places = zip(at, self.block, strict=True)
        return self.base[tuple(slice(i, i + size) for i, size in places)]

    def cut(self, at):
        return tuple(slice(0, n) for n in self.inside(at).shape)

    def read(self, at):
        tile = torch.zeros(self.block, dtype=self.dtype)
        tile[self.cut(at)] = self.inside(at)
        return tile


UNWRITTEN = dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), torch.nan)
UNWRITTEN[torch.int32] = -(2**30)


class Pointer:
    """A pointer into a tensor at one or several offsets."""

    def __init__(self, base, offset):
        self.base, self.offset = base, offset

    def __add__(self, more):
        return Pointer(self.base, self.offset + more)

    def store(self, value, mask):
        self.base[self.offset[mask]] = value[mask]


def round_as_assembly(assembly, constraints, args, dtype, is_pure, pack):
    """Return the numbers as the only assembly of the kernels rounds them: two per instruction.

    The instruction writes its second operand to the lower half of the result.
    """
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    assert assembly == f"cvt.rn.{name}.f32 $0, $2, $1;"
    assert (constraints, is_pure, pack) == ("=r,r,r", True, 2)
    return args[0].to(dtype)


def convert_argument(x, index):
    """Return an argument in the form that the kernel receives."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(x, index)
    return Pointer(x.view(-1), 0) if torch.is_tensor(x) else x


def link_functions(language, home):
    """Return the kernel's functions, linked to another language module."""
    shared, names = {**BELOW, "tl": language}, {**home, **vars(language), "gl": language}
    for space in (shared, names):
        for name, value in space.items():
            # A function compiled by Triton, or one that would be interpreted.
            if isinstance(getattr(value, "fn", None), FunctionType):
                fn = value.fn
                below = shared if fn.__module__ == tiles.__name__ else names
                space[name] = FunctionType(fn.__code__, below, name, fn.__defaults__)
    return names
