"""All-reduce by an MPI library, gloo and this package, alternately, in the same processes.

    mpiexec -n 2 python packages/collectives/tests/beside_mpi.py [SIZES]

prints a row for each size and contender, as JSON, with the versions. It needs the wheels mpich and
mpi4py; the library is found beside the interpreter, or where MPI4PY_LIBMPI says.
"""

import json
import os
import sys
import tempfile
from functools import partial

import collectives
import numpy as np
import torch
import torch.distributed as dist
from collectives import bench

SIZES = (1 << 10, 64 << 10, 1 << 20, 100 << 20)


def main(sizes):
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    folder = everyone.bcast(tempfile.mkdtemp() if everyone.rank == 0 else "")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", everyone.size)
    dist.init_process_group("gloo", store=store, rank=everyone.rank, world_size=everyone.size)
    words = MPI.Get_library_version().split()
    mpi, rows = f"{words[0]} {words[2]}", []
    for size in sizes:
        plain = torch.zeros(size // 4)
        shared = collectives.shared_empty(size // 4)
        contenders = {
            f"gloo of torch {torch.__version__}": partial(dist.all_reduce, plain),
            mpi: partial(everyone.Allreduce, MPI.IN_PLACE, plain.numpy()),
            "auto": partial(collectives.all_reduce, plain),
            "shared_empty": partial(collectives.all_reduce, shared),
        }
        times = bench.time_interleaved(contenders, size, False, "cpu", rounds=15)
        for name, contender_times in times.items():
            ratio = float(np.median(times[mpi].rounds / contender_times.rounds))
            middle = float(np.median(contender_times.rounds)) * 1e6
            rows.append(
                {"case": "all_reduce", "algorithm": name, "world": everyone.size,
                 "size_bytes": size, "time_us": middle, "mpi": mpi, "mpi_over_it": ratio}
            )  # fmt: skip
    if everyone.rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or SIZES)
